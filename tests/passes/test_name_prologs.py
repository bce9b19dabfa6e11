"""Prologs in other people's spellings: their parts and edges, what is refused, and that nothing but labels changes."""

import copy

import pytest
import torch
from captured import one, sketch
from programs import OPERANDS, attended, both_before, prolog_of_mla
from prolog_layers import HEADS, HIDDEN, INDEX, INDEX_HEADS, LATENT, NOPE, RANK, ROPE, B, Layer, T, made, named, traced

from k31compile.graph.named_regions import LABEL, label_of, read_regions
from k31compile.graph.verify_region import verify_region
from k31compile.options import FUSIONS, Options
from k31compile.passes.pipeline import copy_module, run_pipeline
from k31compile.passes.schedule import name_indexer_prolog, name_mla_prolog
from k31compile.report_view import in_parts
from k31compile.targets.reinplace import reinplace_cache_writes

KEY = "wk -> k_norm -> k_rope -> cache_write"
INDEXER = {KEY, "weights_proj -> weights_scale", "wq_b -> q_rope"}
LATENTS = {"kv_down -> kv_norm -> latent_write", "kv_down -> k_rope -> rope_write"}
QUERY = {"q_down -> q_norm -> q_up -> q_rope", "q_up -> absorb"}
PACKED = {"shared_down -> kv_norm -> latent_write", "shared_down -> k_rope -> rope_write", "q_up -> absorb"} | {
    "shared_down -> q_norm -> q_up -> q_rope"
}
PLAIN = {"indexer_prolog": INDEXER, "mla_prolog": QUERY | LATENTS}


def indexer(*chains):
    return PLAIN | {"indexer_prolog": set(chains)}


def mla(*chains):
    return PLAIN | {"mla_prolog": set(chains)}


STYLES = {
    "plain": ({}, PLAIN),
    "pairs": ({"turn": "pairs"}, PLAIN),
    "complex": ({"turn": "complex"}, PLAIN),
    "index_copy": ({"write": "index_copy"}, PLAIN),
    "slice": ({"write": "slice"}, PLAIN),
    "scatter": ({"write": "scatter"}, PLAIN),
    "append": ({"write": "cat"}, PLAIN),
    "norm_by_hand": ({"norm": "by_hand"}, PLAIN),
    "native": ({"native": True}, PLAIN),
    "butterfly": ({"hadamard": "butterfly"}, PLAIN),
    "no_norm": (
        {"norm": ""},
        indexer("wk -> k_rope -> cache_write", "weights_proj -> weights_scale", "wq_b -> q_rope"),
    ),
    "hadamard_matrix": (
        {"hadamard": "matrix", "index_rope": False},
        indexer("wk -> k_norm -> k_transform -> cache_write", "weights_proj -> weights_scale", "wq_b -> q_transform"),
    ),
    "packed_index": (
        {"packed": "index"},
        indexer("shared_down -> k_norm -> k_rope -> cache_write", "shared_down -> weights_scale", "wq_b -> q_rope"),
    ),
    "packed_down": ({"packed": "down"}, mla(*PACKED)),
    "packed_all": (
        {"packed": "all"},
        {
            "indexer_prolog": {"weights_scale", "k_norm -> k_rope -> cache_write", "wq_b -> q_rope"},
            "mla_prolog": PACKED,
        },
    ),
    "full_rank": ({"low_rank": False}, mla("q_proj -> q_rope", "q_proj -> absorb", *LATENTS)),
    "joint_cache": (
        {"joint": True},
        mla(*QUERY, "kv_down -> kv_norm -> kv_join -> latent_write", "kv_down -> k_rope -> kv_join"),
    ),
    "no_rope": (
        {"rope": False, "index_rope": False},
        {
            "indexer_prolog": {"wk -> k_norm -> cache_write", "weights_proj -> weights_scale", "wq_b"},
            "mla_prolog": {"q_down -> q_norm -> q_up -> absorb", "kv_down -> kv_norm -> latent_write"},
        },
    ),
}


def chains(module):
    return {region.name: set(in_parts(region.to_dict()).split("; ")) for region in read_regions(module.graph)}


def without_labels(module):
    return [node.format_node() for node in module.graph.nodes]


SLOW = {"butterfly", "index_copy", "no_rope", "packed_down", "packed_index", "pairs", "scatter"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in STYLES])
def test_parts_and_edges(name):
    options, expected = STYLES[name]
    module, stages = named(made(**options))
    assert chains(module) == expected
    assert [verify_region(module.graph, region) for region in read_regions(module.graph)] == [[], []]
    assert not any(stage.undone or stage.result.refused for stage in stages)


def test_a_part_reads_its_weights_and_its_inputs():
    module, _ = named(made())
    regions = {region.name: region for region in read_regions(module.graph)}
    sizes = {part.name: part.weight_bytes for region in regions.values() for part in region.parts}
    widths = {"q_down": HIDDEN * RANK, "q_up": RANK * HEADS * (NOPE + ROPE), "kv_down": HIDDEN * (LATENT + ROPE)}
    widths |= {"wq_b": RANK * INDEX_HEADS * INDEX, "wk": HIDDEN * INDEX, "weights_proj": HIDDEN * INDEX_HEADS}
    # of the weight that keys and values share, the half of the keys
    widths |= {"absorb": HEADS * NOPE * LATENT, "q_norm": RANK, "kv_norm": LATENT, "k_norm": 2 * INDEX, "q_rope": 0}
    assert {name: sizes[name] for name in widths} == {name: 4 * count for name, count in widths.items()}
    lightning, attention = one(module, "k31.lightning_indexer"), one(module, "k31.sparse_flash_attention")
    assert set(lightning.args[:3]) <= set(regions["indexer_prolog"].outputs)
    served = {attention.args[0], attention.args[1], attention.kwargs["query_rope"], attention.kwargs["key_rope"]}
    assert served <= set(regions["mla_prolog"].outputs)
    (low,) = {n for n in regions["mla_prolog"].part("q_norm").nodes if n in regions["mla_prolog"].outputs}
    assert low in regions["indexer_prolog"].part("wq_b").inputs


@pytest.mark.parametrize("name", ["plain", "packed_all", "joint_cache"])
def test_nothing_but_labels_changes(name):
    model = made(**STYLES[name][0])
    others = tuple(set(FUSIONS) - {"indexer_prolog", "mla_prolog"})
    bare, _ = named(model, Options(fuse=others))
    module, _ = named(model)
    assert without_labels(module) == without_labels(bare)
    assert not any(label_of(node) for node in bare.graph.nodes)


@pytest.mark.parametrize("name", ["plain", "packed_all"])
def test_a_second_run_finds_the_same(name):
    module, _ = named(made(**STYLES[name][0]))
    labels = {node: label_of(node) for node in module.graph.nodes}
    for one_pass in (name_mla_prolog.name_mla_prolog, name_indexer_prolog.name_indexer_prolog):
        assert one_pass(module, Options()).changed == 0
    assert {node: label_of(node) for node in module.graph.nodes} == labels


def test_the_indexer_alone_holds_what_is_packed():
    others = tuple(set(FUSIONS) - {"mla_prolog"})
    module, _ = named(made(packed="all"), Options(fuse=others))
    (region,) = read_regions(module.graph)
    assert verify_region(module.graph, region) == []
    assert set(in_parts(region.to_dict()).split("; ")) == {
        "shared_down -> k_norm -> k_rope -> cache_write",
        "shared_down -> weights_scale",
        "shared_down -> q_norm -> wq_b -> q_rope",
    }


def test_labels_survive_copies_and_writes_in_place():
    module, _ = named(made(write="slice"))
    names = {node.name for node in module.graph.nodes if label_of(node)}
    for same in (copy_module(module), copy.deepcopy(module)):
        assert {node.name for node in same.graph.nodes if label_of(node)} == names
        assert [r.to_dict() for r in read_regions(same.graph)] == [r.to_dict() for r in read_regions(module.graph)]
    assert reinplace_cache_writes(module) == 3
    written = [node for node in module.graph.nodes if str(node.target) == "aten.copy_.default"]
    assert [label_of(node).part for node in written] == ["cache_write", "latent_write", "rope_write"]
    assert [len(region.parts) for region in read_regions(module.graph)] == [8, 10]


class GivenWeights(Layer):
    """The head weights are learned numbers, whatever the token."""

    def _projected(self, x):
        q, kv, key, _ = super()._projected(x)
        return q, kv, key, self.k_norm.bias[:INDEX_HEADS].expand(B, T, -1)


class GivenKey(Layer):
    """The index keys were written before."""

    def _written(self, name, rows, place):
        return self.keys if name == "keys" else super()._written(name, rows, place)


class GivenQuery(Layer):
    """The query comes from elsewhere, as rows of a table."""

    def _attend(self, nope, q_rope, *rest):
        given = self.matrix.flatten()[: B * T * HEADS * NOPE].view(B, T, HEADS, NOPE)
        return super()._attend(given, q_rope, *rest)


class GivenLatent(Layer):
    """The latent was written before, and its rotated part is of full width."""

    def _written(self, name, rows, place):
        return getattr(self, name) if name in ("latents", "ropes") else super()._written(name, rows, place)


def refusals(kind, **options):
    torch.manual_seed(0)
    module, stages = named(kind(**options).requires_grad_(False).eval())
    found = [(r.name, r.reason, r.near_miss) for stage in stages for r in stage.result.refused]
    return read_regions(module.graph), found


@pytest.mark.parametrize(
    ("kind", "kept", "reason"),
    [
        (
            GivenWeights,
            "mla_prolog",
            "its part weights_proj is missing: nothing in this graph projects the indexer's weights",
        ),
        (GivenKey, "mla_prolog", "its part wk is missing: nothing in this graph projects the indexer's key"),
        (
            GivenLatent,
            "indexer_prolog",
            "its part kv_down is missing: nothing in this graph projects the attention's latent",
        ),
    ],
)
def test_what_lacks_one_part_is_refused_with_its_name(kind, kept, reason):
    regions, found = refusals(kind)
    assert [region.name for region in regions] == [kept]
    ((name, said, near_miss),) = found
    assert {name, kept} == {"indexer_prolog", "mla_prolog"}
    assert said == reason
    assert near_miss


def test_a_query_from_another_graph_begins_with_what_absorbs_it():
    regions, found = refusals(GivenQuery, rope=False, index_rope=False)
    assert [region.name for region in regions] == ["indexer_prolog", "mla_prolog"]
    assert in_parts(regions[1].to_dict()) == "absorb; kv_down -> kv_norm -> latent_write"
    assert not found


def test_a_query_without_any_projection_is_refused():
    def program(*operands):
        _, rows, chosen = prolog_of_mla(*operands)
        return attended(operands[0], rows, chosen)

    module, stages = run_pipeline(sketch(program, *OPERANDS.values()).module, Options(), "cpu")
    assert not read_regions(module.graph)
    reasons = [r.reason for stage in stages for r in stage.result.refused]
    assert reasons == ["its part q_up is missing: nothing in this graph projects the attention's query"]


class TwoHalves(Layer):
    """One projection, two selections and attentions for two halves of the rows, as context parallelism has them."""

    def _attend(self, nope, q_rope, latents, ropes, chosen, place):
        first = super()._attend(nope, q_rope, latents, ropes, chosen, place)
        return first + super()._attend(nope * 0.5, q_rope, latents, ropes, chosen, place)


def test_attentions_that_share_a_product_have_one_prolog():
    torch.manual_seed(0)
    module, stages = named(TwoHalves().requires_grad_(False).eval())
    assert len([n for n in module.graph.nodes if str(n.target) == "k31.sparse_flash_attention.default"]) == 2
    regions = [region for region in read_regions(module.graph) if region.name == "mla_prolog"]
    assert len(regions) == 1
    assert verify_region(module.graph, regions[0]) == []
    assert not any(stage.result.refused for stage in stages)


class Direct(torch.nn.Module):
    """Head weights that are the layer's input itself: the product above them is an earlier layer's."""

    def __init__(self, residual):
        super().__init__()
        self.before, self.residual = torch.nn.Linear(HIDDEN, HIDDEN, bias=False), residual
        self.layer = Layer()

    def forward(self, x, start):
        x = self.before(x) + (x if self.residual else 0)
        place, ones = start[:, None] + torch.arange(T), torch.ones(B, T, 2)
        key = self.layer._projected(x)[2]
        return self.layer._select(x[..., :RANK], key, x[..., :INDEX_HEADS].abs(), place, ones, ones)


@pytest.mark.parametrize(
    ("residual", "reason"),
    [
        (True, "its part weights_proj is missing: nothing in this graph projects the indexer's weights"),
        (False, "its part weights_proj is missing: an earlier layer projects the indexer's weights"),
    ],
)
def test_an_earlier_layer_is_no_projection(residual, reason):
    torch.manual_seed(0)
    module, stages = named(Direct(residual).requires_grad_(False).eval())
    assert not read_regions(module.graph)
    assert [r.reason for stage in stages for r in stage.result.refused] == [reason]


def test_a_query_of_an_earlier_layer_is_refused():
    def program(*operands):
        given = dict(zip(OPERANDS, operands, strict=True))
        earlier = given["hidden"] @ given["query_index"]
        latent = earlier @ given["query_index"].t() @ given["latent_down"]
        rows = given["latents"].index_copy(1, given["places"], torch.nn.functional.rms_norm(latent, latent.shape[-1:]))
        return attended(earlier.view(B, 5, 3, 24), rows, given["i"])

    module, stages = run_pipeline(sketch(program, *OPERANDS.values()).module, Options(), "cpu")
    assert not read_regions(module.graph)
    reasons = [r.reason for stage in stages for r in stage.result.refused]
    assert reasons == ["its part q_up is missing: an earlier layer projects the attention's query"]


def test_four_products_in_a_row_are_refused():
    def program(*operands):
        given = dict(zip(OPERANDS, operands, strict=True))
        again = given["hidden"] @ given["query_down"] @ given["query_down"].t()
        rows = given["latents"].index_copy(1, given["places"], given["hidden"] @ given["latent_down"])
        query = (again @ given["query_down"] @ given["query_up"]).view(B, 5, 3, 24)
        return attended(query, rows, given["i"])

    module, stages = run_pipeline(sketch(program, *OPERANDS.values()).module, Options(), "cpu")
    assert not read_regions(module.graph)
    reasons = [r.reason for stage in stages for r in stage.result.refused]
    assert reasons == ["its part q_up is missing: 4 products follow on each other before the query"]


def test_in_bfloat16_the_factor_of_the_weights_is_the_indexers():
    """The scores are computed in float32: the smaller operand is in front of the cast, and the factor behind it."""
    module, _ = named(made(), dtype=torch.bfloat16)
    assert chains(module) == indexer(KEY, "weights_proj", "wq_b -> q_rope")
    sizes = {part.name: part.weight_bytes for region in read_regions(module.graph) for part in region.parts}
    assert sizes["wk"] == 2 * HIDDEN * INDEX


def test_given_operands_have_no_prolog_and_no_sentence():
    module, stages = run_pipeline(sketch(both_before, *OPERANDS.values()).module, Options(), "cpu")
    assert not read_regions(module.graph)
    assert not any(stage.result.refused for stage in stages)


def test_without_fused_operators_nothing_is_named():
    model = made()
    module, stages = named(model, Options(fuse=("indexer_prolog", "mla_prolog")))
    assert [stage.run.changed for stage in stages] == [0, 0]
    assert without_labels(module) == without_labels(traced(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "packed_all", "joint_cache", "native"])
def test_every_wrong_label_is_found_out(name):
    """One node at a time into each other part of its region, and out of the region."""
    module, _ = named(made(**STYLES[name][0]))
    for region in read_regions(module.graph):
        labels = {part.name: label_of(part.nodes[0]) for part in region.parts}
        for node in region.nodes:
            own = node.meta.pop(LABEL)
            for label in (None, *(other for other in labels.values() if other != own)):
                node.meta.pop(LABEL, None)
                node.meta.update({LABEL: label} if label else {})
                found = [r for r in read_regions(module.graph) if (r.name, r.number) == (region.name, region.number)]
                assert not found or verify_region(module.graph, found[0]), f"{node.name} in {label}"
            node.meta[LABEL] = own
        assert verify_region(module.graph, region) == []
