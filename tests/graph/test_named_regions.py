"""Named regions: labels, reading them back, and a check that every wrong label, edge and border fails."""

import itertools
import operator
from dataclasses import replace

import pytest
import torch
from torch import fx

from k31compile.graph.named_regions import LABEL, label_of, label_region, read_regions
from k31compile.graph.verify_region import verify_region
from k31compile.graph.weights import stored_bytes, weights_among

ATEN = torch.ops.aten


class Writer:
    """A graph by hand: placeholders are activations or weights, every node has a value of its own shape."""

    def __init__(self):
        self.graph = fx.Graph()

    def given(self, name, *shape, weight=False):
        node = self.graph.placeholder(name)
        node.meta.update(val=torch.empty(shape, device="meta"), is_parameter=weight)
        return node

    def call(self, target, *args):
        name = target.__name__.partition(".")[0]
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = torch.empty(2, 6, device="meta")
        return node


def key_side():
    """x -> down -> two halves -> norm and rotation -> join -> write; a gate reads the norm outside."""
    w = Writer()
    x, cos, cache = w.given("x", 2, 5), w.given("cos", 2, 6), w.given("cache", 9, 12)
    down, scale = w.given("down", 12, 5, weight=True), w.given("scale", 6, weight=True)
    product = w.call(ATEN.linear.default, x, down)
    split = w.call(ATEN.split_with_sizes.default, product, [6, 6], -1)
    first, second = w.call(operator.getitem, split, 0), w.call(operator.getitem, split, 1)
    norm = w.call(ATEN.rms_norm.default, first, [6], scale)
    turned = w.call(ATEN.mul.Tensor, second, cos)
    moved = w.call(ATEN.neg.default, turned)
    joined = w.call(ATEN.cat.default, [norm, moved], -1)
    written = w.call(ATEN.index_copy.default, cache, 0, cos, joined)
    gate = w.call(ATEN.sigmoid.default, norm)
    w.graph.output((written, gate))
    parts = {
        "down": ("product", [product, split, first, second]),
        "norm": ("norm", [norm]),
        "rope": ("vector", [turned, moved]),
        "join": ("vector", [joined]),
        "write": ("write", [written]),
    }
    label_region("some_prolog", 0, parts)
    return w.graph


EDGES = {("down", "norm"), ("down", "rope"), ("norm", "join"), ("rope", "join"), ("join", "write")}


def only(graph):
    (region,) = read_regions(graph)
    return region


def test_a_region_is_read_back_as_it_was_labelled():
    graph = key_side()
    region = only(graph)
    assert (region.name, region.number) == ("some_prolog", 0)
    assert set(region.edges) == EDGES
    assert [part.name for part in region.parts] == ["down", "norm", "rope", "join", "write"]
    assert [node.name for node in region.inputs] == ["x", "cos", "cache", "down", "scale"]
    assert [node.name for node in region.outputs] == ["rms_norm", "index_copy"]
    assert {part.name: part.weight_bytes for part in region.parts} == {
        "down": 4 * 12 * 5, "norm": 4 * 6, "rope": 0, "join": 0, "write": 0,
    }  # fmt: skip
    assert verify_region(graph, region) == []


def test_a_graph_without_labels_has_no_region():
    graph = key_side()
    for node in graph.nodes:
        node.meta.pop(LABEL, None)
    assert read_regions(graph) == []


def test_two_of_a_name_are_two_regions():
    graph = key_side()
    gate = next(node for node in graph.nodes if node.target is ATEN.sigmoid.default)
    label_region("some_prolog", 1, {"gate": ("vector", [gate])})
    assert [(region.number, len(region.parts)) for region in read_regions(graph)] == [(0, 5), (1, 1)]
    assert all(verify_region(graph, region) == [] for region in read_regions(graph))


def labelled_nodes():
    return [node.name for node in key_side().nodes if label_of(node)]


@pytest.mark.parametrize("name", labelled_nodes())
def test_a_node_in_another_part_is_found_out(name):
    graph = key_side()
    node = next(node for node in graph.nodes if node.name == name)
    own = label_of(node)
    for other in {label_of(n) for n in graph.nodes if label_of(n)} - {own}:
        node.meta[LABEL] = other
        assert verify_region(graph, only(graph)), f"{name} in {other.part}"


@pytest.mark.parametrize("name", labelled_nodes())
def test_a_lost_label_is_found_out(name):
    graph = key_side()
    node = next(node for node in graph.nodes if node.name == name)
    region = only(graph)
    del node.meta[LABEL]
    assert any(f"{name} is not labelled as" in problem for problem in verify_region(graph, region))
    assert verify_region(graph, only(graph))


def test_a_label_too_many_is_found_out():
    graph = key_side()
    gate = next(node for node in graph.nodes if node.target is ATEN.sigmoid.default)
    region = only(graph)
    gate.meta[LABEL] = next(label_of(n) for n in graph.nodes if n.target is ATEN.rms_norm.default)
    assert verify_region(graph, region) == ["sigmoid is labelled as norm and is in no part"]
    assert verify_region(graph, only(graph))


@pytest.mark.parametrize("edge", sorted(EDGES))
def test_a_lost_edge_is_found_out(edge):
    graph = key_side()
    region = only(graph)
    wrong = replace(region, edges=tuple(e for e in region.edges if e != edge))
    assert verify_region(graph, wrong) == [f"{edge[1]} reads {edge[0]}, and there is no such edge"]


def test_an_edge_too_many_is_found_out():
    graph = key_side()
    region = only(graph)
    for edge in set(itertools.permutations([part.name for part in region.parts], 2)) - EDGES:
        problems = verify_region(graph, replace(region, edges=(*region.edges, edge)))
        assert f"there is an edge from {edge[0]} to {edge[1]}, and {edge[1]} does not read {edge[0]}" in problems
    assert verify_region(graph, replace(region, edges=(*region.edges, region.edges[0]))) == [
        "an edge is declared twice"
    ]


def test_other_borders_and_orders_are_found_out():
    graph = key_side()
    region = only(graph)
    for name, value in (
        ("inputs", region.inputs[1:]),
        ("inputs", (*region.inputs, region.outputs[0])),
        ("outputs", region.outputs[:1]),
        ("outputs", (*region.outputs, region.nodes[0])),
        ("parts", region.parts[1:]),
        ("parts", region.parts[::-1]),
        ("parts", (*region.parts, region.parts[0])),
        ("parts", (replace(region.parts[0], inputs=()), *region.parts[1:])),
        ("parts", (replace(region.parts[0], nodes=region.parts[0].nodes * 2), *region.parts[1:])),
        ("parts", (replace(region.parts[0], nodes=()), *region.parts[1:])),
        ("parts", (replace(region.parts[0], kind="vector"), *region.parts[1:])),
        ("number", 1),
    ):
        assert verify_region(graph, replace(region, **{name: value})), (name, value)


def test_a_path_that_leaves_and_comes_back_is_found_out():
    graph = key_side()
    moved = next(node for node in graph.nodes if node.target is ATEN.neg.default)
    parts = {}
    for part in only(graph).parts:
        nodes = [node for node in part.nodes if node is not moved]
        parts[part.name] = (part.kind, nodes)
    del moved.meta[LABEL]
    label_region("some_prolog", 0, parts)
    assert verify_region(graph, only(graph)) == [
        "cat in join reads neg, which is outside and depends on the region",
    ]


def test_products_belong_into_product_parts():
    """A part that only moves, a product among norms, two products in a row, and something before a product."""
    w = Writer()
    x, a, b = w.given("x", 2, 6), w.given("a", 6, 6, weight=True), w.given("b", 6, 6, weight=True)
    first = w.call(ATEN.exp.default, x)
    product = w.call(ATEN.mm.default, first, a)
    view = w.call(ATEN.view.default, product, [2, 6])
    second = w.call(ATEN.mm.default, view, b)
    w.graph.output((second,))

    def problems(**parts):
        for node in w.graph.nodes:
            node.meta.pop(LABEL, None)
        label_region("some_prolog", 0, {name: tuple(part) for name, part in parts.items()})
        return verify_region(w.graph, only(w.graph))

    assert problems(up=("product", [product, view]), out=("product", [second])) == []
    assert problems(up=("product", [product]), view=("vector", [view]), out=("product", [second])) == [
        "view in view only moves what up computed"
    ]
    assert problems(up=("vector", [product, view])) == ["part up is no product and holds mm"]
    assert problems(up=("product", [product, view, second])) == ["mm_1 in up is a product of another product there"]
    assert problems(up=("product", [view])) == [
        "part up is a product and has none",
        "view in up does not come after its product",
    ]
    assert problems(up=("product", [first, product, view])) == []


def test_weights_and_their_bytes():
    w = Writer()
    x, weight = w.given("x", 2, 6), w.given("weight", 8, 6, weight=True)
    half = w.call(ATEN.slice.Tensor, weight, 0, 0, 2)
    wide = w.call(ATEN._to_copy.default, half)
    wide.meta["val"] = torch.empty(2, 6, dtype=torch.float64, device="meta")
    scaled = w.call(ATEN.mul.Tensor, half, 2)
    mixed = w.call(ATEN.mul.Tensor, half, x)
    ones = w.call(ATEN.ones.default, [2])
    w.graph.output((wide, scaled, mixed, ones))
    assert weights_among(w.graph.nodes) == {weight, half, wide, scaled}
    assert stored_bytes(weight) == 4 * 48
    # a slice and a cast of it take the slice's bytes as stored; what is computed takes all that it is computed from
    assert stored_bytes(half) == stored_bytes(wide) == 4 * 12
    assert stored_bytes(scaled) == 4 * 48
