"""Where a sparse attention may be: a softmax below an index tensor, and the parts around it."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_float, is_integer, is_tensor, shape_of
from k31compile.graph.views import is_view, same_size_base
from k31compile.passes.recognise.contractions import is_contraction, nearest_contractions, operands
from k31compile.passes.recognise.operands import is_parameter

SDPA = ATEN.scaled_dot_product_attention.default
SOFTMAXES = {ATEN.softmax.int, ATEN._softmax.default, ATEN.exp.default, SDPA}
_SORTS = {ATEN.topk.default, ATEN.sort.default, ATEN.sort.stable}
_ARGSORTS = {ATEN.argsort.default, ATEN.argsort.stable}
_READS_BY_INDEX = {
    ATEN.scatter.value,
    ATEN.scatter.src,
    ATEN.gather.default,
    ATEN.index.Tensor,
    ATEN.index_select.default,
    ATEN.take_along_dim.default,
    ATEN.index_put.default,
    ATEN.eq.Tensor,
}
# From the indices to the softmax there are a mask or a gather, not half a model.
_FAR = 80


@dataclass(frozen=True)
class Attention:
    """A softmax, the indices above it, the dots and projections around it, and the value that leaves it.

    `direct` is what lies between indices and output without a detour through the rest of the model, which the indices
    reach too where two attentions share them.
    """

    softmax: fx.Node
    indices: fx.Node
    output: fx.Node
    direct: frozenset[fx.Node]
    dots: frozenset[fx.Node]
    projections: frozenset[fx.Node]

    @property
    def known_keys(self) -> dict[str, int]:
        """The number of keys as letter s, where the graph tells it."""
        keys = keys_selected_from(self.indices)
        return {} if keys is None else {"s": keys}

    @property
    def projection_weights(self) -> set[fx.Node]:
        """What the projections multiply the latent with."""
        return {operand for node in self.projections for operand in operands(node)}


def is_indexer(node: fx.Node) -> bool:
    """Whether the node is a fused indexer."""
    return str(node.target) == "k31.lightning_indexer.default"


def keys_selected_from(indices: fx.Node) -> int | None:
    """How many keys the indices were chosen from, where their maker is in the graph."""
    if is_indexer(indices):
        key, table = indices.args[1], indices.kwargs.get("block_table")
        assert isinstance(key, fx.Node)
        return shape_of(key)[1] * (shape_of(table)[1] if isinstance(table, fx.Node) else 1)
    source = indices.args[0] if indices.op == "call_function" else None
    if isinstance(source, fx.Node) and not is_tensor(source):
        source = source.args[0]
    return shape_of(source)[-1] if isinstance(source, fx.Node) and is_float(source) else None


def attentions_of(flow: Dataflow) -> list[Attention]:
    """Every softmax with indices close above it, in the order of the graph."""
    return flow.remember("attentions", lambda: list(_attentions(flow)))


def _attentions(flow: Dataflow) -> Iterator[Attention]:
    for node in flow.nodes:
        if node.target in SOFTMAXES and node not in flow.constants:
            indices = indices_above(flow, node)
            output = output_of(flow, node)
            if indices is not None and output is not None:
                direct = _direct(flow, indices, output)
                yield Attention(node, indices, output, direct, *parts_of(flow, node, indices, output))


def indices_above(flow: Dataflow, softmax: fx.Node) -> fx.Node | None:
    """The nearest index tensor above the softmax, breadth first; an input of the graph only where nothing selects."""
    given: fx.Node | None = None
    seen: set[fx.Node] = set()
    front = [softmax]
    while front and len(seen) < 4 * _FAR:
        following: list[fx.Node] = []
        for node in front:
            for source in flow.inputs[node]:
                if source in seen or source in flow.constants:
                    continue
                seen.add(source)
                if selects(source):
                    return source
                if given is None and _is_given(flow, source):
                    given = source
                if not _is_detour(source):
                    following.append(source)
        front = following
    return given


def _direct(flow: Dataflow, indices: fx.Node, output: fx.Node) -> frozenset[fx.Node]:
    """The nodes from the indices to the output that do not go through a projection."""
    above = flow.ancestors([output], stop=lambda node: node is indices or (node is not output and _is_detour(node)))
    reached: set[fx.Node] = set()
    todo = [user for user in flow.users[indices] if user in above]
    while todo:
        node = todo.pop()
        if node not in reached and not _is_detour(node):
            reached.add(node)
            todo.extend(user for user in flow.users[node] if user in above)
    return frozenset(reached)


def _is_detour(node: fx.Node) -> bool:
    """A projection by a weight leads out of the attention, unless it projects what the indices gathered."""
    if not is_contraction(node):
        return False
    factors = operands(node)
    return any(is_parameter(o) for o in factors) and not any(_is_gathered(o) for o in factors)


def _is_gathered(node: fx.Node) -> bool:
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.target in _READS_BY_INDEX and isinstance(node.args[0], fx.Node) and not is_parameter(node.args[0])


def selects(node: fx.Node) -> bool:
    """Whether the node holds the places of what was selected."""
    if is_indexer(node) or node.target in _ARGSORTS:
        return True
    if getattr(node.target, "__name__", "") != "getitem" or not isinstance(node.args[0], fx.Node):
        return False
    return node.args[0].target in _SORTS and node.args[1:] == (1,)


def _is_given(flow: Dataflow, node: fx.Node) -> bool:
    """Whether an integer input of the graph is read as indices: a graph break may lie before the attention."""
    is_wide = node.op == "placeholder" and is_integer(node) and len(shape_of(node)) >= 2 and shape_of(node)[-1] > 1
    return is_wide and any(_reads_by_index(flow, node, depth=6))


def _reads_by_index(flow: Dataflow, node: fx.Node, depth: int) -> Iterator[bool]:
    """Whether something selects by these integers, possibly after casts, views and comparisons of them."""
    for user in flow.users[node]:
        if _reads_whole_pages(user):
            continue
        if user.target in _READS_BY_INDEX and (user.args[0] is not node or user.target is ATEN.eq.Tensor):
            yield not (user.target is ATEN.eq.Tensor and not is_tensor(user))
        elif depth and is_tensor(user) and not is_float(user):
            yield from _reads_by_index(flow, user, depth - 1)


def _reads_whole_pages(node: fx.Node) -> bool:
    """Whether the integers name blocks of a pool, all of whose positions are read: a block table chooses no keys."""
    is_gather = node.target is ATEN.index.Tensor and len(node.args[1]) == 1  # type: ignore[arg-type]
    is_selection = node.target is ATEN.index_select.default and node.args[1] == 0
    pool = node.args[0] if is_gather or is_selection else None
    return isinstance(pool, fx.Node) and len(shape_of(pool)) > 2


def output_of(flow: Dataflow, softmax: fx.Node) -> fx.Node | None:
    """The first value that all of the softmax goes through and that contains a sum over the keys' values."""
    if softmax.target is SDPA:
        return softmax
    for node in flow.post_dominators(softmax):
        inner = flow.between([softmax], [node]) - {softmax}
        if is_float(node) and any(is_contraction(n) and not _normalises(n, softmax) for n in inner):
            return node
        if len(inner) > _FAR:
            return None
    return None


def _normalises(node: fx.Node, softmax: fx.Node) -> bool:
    """A sum of the softmax's own values, as a softmax by hand has one."""
    return node.target in (ATEN.sum.dim_IntList,) and same_size_base(node.args[0]) is softmax  # type: ignore[arg-type]


def parts_of(
    flow: Dataflow, softmax: fx.Node, indices: fx.Node | None, output: fx.Node
) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """The dots above the softmax, and the projections that make its keys and values from one latent."""
    if softmax.target is SDPA:
        dots: set[fx.Node] = set()
        key_side = {node for node in softmax.args[1:2] if isinstance(node, fx.Node)}
        value_side = {node for node in softmax.args[2:3] if isinstance(node, fx.Node)}
    else:
        dots = nearest_contractions(flow, flow.inputs[softmax], inside=lambda node: node is not indices)
        below = flow.descendants([softmax])
        sums = {n for n in flow.between([softmax], [output]) if is_contraction(n)}
        key_side = {operand for node in dots for operand in operands(node)}
        value_side = {operand for node in sums for operand in operands(node) if operand not in below}
    makes_keys = nearest_contractions(flow, key_side, inside=lambda node: node is not indices)
    makes_values = nearest_contractions(flow, value_side, inside=lambda node: node is not indices)
    projections = makes_keys & makes_values
    if not projections:
        projections = {
            node
            for values in makes_values
            for keys in makes_keys
            if {same_size_base(o) for o in operands(values)} & {same_size_base(o) for o in operands(keys)}
            for node in (values, keys)
        }
    return frozenset(dots), frozenset(projections)
