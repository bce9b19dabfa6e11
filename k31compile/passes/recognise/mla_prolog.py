"""The prolog of multi-head latent attention: queries and the latent from the layer's input (K3.1 spec 2.7)."""

from collections.abc import Collection, Iterable

from torch import fx

from k31compile.graph.dataflow import Dataflow
from k31compile.graph.sizes import numel_of, shape_of
from k31compile.graph.views import behind_views_and_casts
from k31compile.passes.recognise.chains import activation_of, end_of_write, is_product, nearest_products, weights_of
from k31compile.passes.recognise.contractions import operands
from k31compile.passes.recognise.parts import Group, rotates
from k31compile.passes.recognise.prolog import Extent, Missing, Prolog

_ATTENTION = "k31.sparse_flash_attention.default"
_QUERY, _KEY = frozenset({"query", "query_rope"}), frozenset({"key", "key_rope"})
# From the layer's input to the query: down, up, into the latent space.
_MOST_STEPS = 3


class MlaProlog(Prolog):
    """Anchored on a fused sparse attention whose one key for all heads is also its value."""

    name = "mla_prolog"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The fused attentions over a latent."""
        return [node for node in flow.nodes if str(node.target) == _ATTENTION and _is_latent(node)]

    def extent(self, flow: Dataflow, anchor: fx.Node) -> Extent | Missing | None:
        """All products between the input of the latent's product and the operands; without one on the query's side, as
        where its low-rank form is an input of the graph, the query's nearest."""
        query = _given(anchor.args[0], anchor.kwargs.get("query_rope"))
        key = [end_of_write(node) for node in _given(anchor.args[1], anchor.kwargs.get("key_rope"))]
        latent = set().union(*(nearest_products(flow, end) for end in key))
        nearest = set().union(*(nearest_products(flow, end) for end in query))
        if not latent or not nearest:
            if not latent and not nearest:
                return None
            part, which = ("q_up", "query") if latent else ("kv_down", "latent")
            return Missing(part, f"nothing in this graph projects the attention's {which}")
        begin = {activation_of(flow, product) for product in latent}
        inner = {n for n in flow.between(begin, query) if is_product(flow, n)}
        if not inner & nearest:
            if nearest & flow.ancestors(begin):
                return Missing("q_up", "an earlier layer projects the attention's query")
            inner = nearest
        projections = inner | latent
        depths = _depths(flow, projections)
        if max(depths.values()) > _MOST_STEPS:
            return Missing("q_up", f"{max(depths.values())} products follow on each other before the query")
        names: dict[fx.Node, frozenset[str]] = {}
        for operand, end in (*zip(("query", "query_rope"), query), *zip(("key", "key_rope"), key)):  # noqa: B905
            names[end] = names.get(end, frozenset()) | {operand}
        return Extent(frozenset(projections), names)

    def name_of(self, flow: Dataflow, inside: set[fx.Node], group: Group) -> str:
        """By the operands that it serves and by how many products stand above it."""
        queries, keys = group.reach & _QUERY, group.reach & _KEY
        if queries and keys:
            return {"product": "shared_down", "norm": "shared_norm"}.get(group.kind, "shared_transform")
        if keys:
            return _key_side(flow, inside, group)
        stage = _stages(flow, inside, group.above)[max(_depths(flow, group.above).values(), default=1)]
        if group.kind == "product":
            return stage
        if group.kind == "norm":
            return "q_norm" if stage == "q_down" else "q_head_norm"
        if stage == "absorb":
            return "q_join"
        return "q_rope" if rotates(flow, group, inside) else "q_transform"


def _key_side(flow: Dataflow, inside: set[fx.Node], group: Group) -> str:
    latent = "key" in group.reach
    if group.kind == "product":
        return "kv_down" if latent else "kr_down"
    if group.kind == "norm":
        return "kv_norm" if latent else "kr_norm"
    if group.kind == "write":
        return "latent_write" if latent else "rope_write"
    if len(group.seeds) > 1:
        return "kv_join"
    if rotates(flow, group, inside):
        return "k_rope"
    return "kv_transform" if latent else "k_transform"


def _is_latent(attention: fx.Node) -> bool:
    """Whether one key serves all heads and the value is that key, or a slice of it."""
    key, value = attention.args[1:3]
    if not isinstance(key, fx.Node) or not isinstance(value, fx.Node):
        return False
    same = behind_views_and_casts(end_of_write(key)) is behind_views_and_casts(end_of_write(value))
    return same and len(shape_of(key)) == 4 and shape_of(key)[2] == 1


def _given(*arguments: object) -> list[fx.Node]:
    return [argument for argument in arguments if isinstance(argument, fx.Node)]


def _depths(flow: Dataflow, products: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """For each product, itself and how many of the others stand above it in a row."""
    ordered = flow.in_order(products)
    depths: dict[fx.Node, int] = {}
    for node in ordered:
        earliest = flow.position[ordered[0]]
        above = flow.ancestors(flow.inputs[node], stop=lambda n, e=earliest: flow.position[n] < e)  # type: ignore[misc]
        depths[node] = 1 + max((depths[n] for n in ordered if n in above and n in depths), default=0)
    return depths


def _stages(flow: Dataflow, inside: set[fx.Node], own: Collection[fx.Node]) -> dict[int, str]:
    """What the products before the query, `own` among them, are by depth: down, up, into the latent space."""
    depths = _depths(flow, (node for node in inside if is_product(flow, node)))
    last = max(depths.values(), default=1)
    if last == _MOST_STEPS:
        return {1: "q_down", 2: "q_up", 3: "absorb"}
    tokens = min(_rows(activation_of(flow, node)) for node, depth in depths.items() if depth == 1)
    # Of those that stand alone some are the latent's.
    deepest = [node for node, depth in depths.items() if depth == last and (last > 1 or node in own)]
    names = ("q_proj", "absorb") if _is_for_each_head(flow, deepest, tokens) else ("q_down", "q_up")
    if last == 1:
        return {1: "absorb" if "absorb" in names else "q_proj"}
    return dict(enumerate(names, start=1))


def _rows(node: fx.Node) -> int:
    return numel_of(node) // shape_of(node)[-1]


def _is_for_each_head(flow: Dataflow, products: list[fx.Node], tokens: int) -> bool:
    """Whether heads have weights of their own: in one product, or as parts of one weight in several."""
    weights = weights_of(flow)
    if not products:
        return False
    if len(products) > 1:
        bases = [behind_views_and_casts(f) for p in products for f in operands(p) if f in weights]
        return len(set(bases)) < len(bases)
    (product,) = products
    given = sum(numel_of(f) for f in operands(product) if f not in weights and f not in flow.constants)
    read = sum(numel_of(f) for f in operands(product) if f in weights)
    # A plain product has in * out weights; with H heads each has in / H * out / H of its own.
    return given * numel_of(product) > tokens * tokens * read
