"""The prolog of a lightning indexer: query, key and head weights from the layer's input (K3.1 spec 2.10)."""

from collections.abc import Iterable

from torch import fx

from k31compile.graph.dataflow import Dataflow
from k31compile.passes.recognise.attention_anchor import is_indexer
from k31compile.passes.recognise.chains import end_of_write, nearest_products
from k31compile.passes.recognise.parts import Group, rotates
from k31compile.passes.recognise.prolog import Extent, Missing, Prolog

_OPERANDS = {"query": "wq_b", "key": "wk", "weights": "weights_proj"}
_SHORT = {"query": "q", "key": "k", "weights": "weights"}


class IndexerProlog(Prolog):
    """Anchored on a fused indexer; each of its three operands is projected, the key normed and written to a cache."""

    name = "indexer_prolog"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The fused indexers."""
        return [node for node in flow.nodes if is_indexer(node)]

    def extent(self, flow: Dataflow, anchor: fx.Node) -> Extent | Missing | None:
        """From the nearest product above each operand; the key ends in the cache that it is written to."""
        query, key, weights = (argument for argument in anchor.args[:3] if isinstance(argument, fx.Node))
        ends = {"query": query, "key": end_of_write(key), "weights": weights}
        found = {operand: nearest_products(flow, end) for operand, end in ends.items()}
        missing = [operand for operand, products in found.items() if not products]
        if len(missing) > 1:
            return None
        if missing:
            return Missing(_OPERANDS[missing[0]], f"nothing in this graph projects the indexer's {missing[0]}")
        if upstream := _upstream(flow, found):
            return Missing(_OPERANDS[upstream], f"an earlier layer projects the indexer's {upstream}")
        names = {end: frozenset(o for o, other in ends.items() if other is end) for end in ends.values()}
        return Extent(frozenset().union(*found.values()), names)

    def name_of(self, flow: Dataflow, inside: set[fx.Node], group: Group) -> str:
        """By the operand that it serves; what serves several is shared."""
        if group.kind == "write":
            return "cache_write"
        if len(group.reach) != 1:
            return {"product": "shared_down", "norm": "shared_norm"}.get(group.kind, "shared_transform")
        operand = next(iter(group.reach))
        if group.kind == "product":
            return _OPERANDS[operand]
        if group.kind == "norm":
            return f"{_SHORT[operand]}_norm"
        if operand == "weights":
            return "weights_scale"
        return f"{_SHORT[operand]}_rope" if rotates(flow, group, inside) else f"{_SHORT[operand]}_transform"


def _upstream(flow: Dataflow, found: dict[str, set[fx.Node]]) -> str:
    """The operand whose product the key or the weights are computed from: then it belongs to an earlier layer."""
    for reader in ("key", "weights"):
        above = flow.ancestors(found[reader], stop=lambda node: flow.position[node] < _first(flow, found))
        for operand, products in found.items():
            if (products - found[reader]) & above:
                return operand
    return ""


def _first(flow: Dataflow, found: dict[str, set[fx.Node]]) -> int:
    return min(flow.position[node] for products in found.values() for node in products)
