"""The parts of a KDA layer in a graph: convolutions above the delta rule, a gated norm below, and the glue between."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from k31compile.graph.confirm import Mismatch
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_float, numel_of, shape_of, value_of
from k31compile.graph.views import CASTS, COPIES, is_narrowing, is_view
from k31compile.passes.recognise.contractions import is_contraction

RULE = "k31.kda_recurrent.default"
CONV = "k31.short_conv.default"
NORM = "k31.gated_rms_norm.default"
_FETCHES = {ATEN.index.Tensor, ATEN.index_select.default, ATEN.embedding.default, ATEN.gather.default}
_MATRICES = {ATEN.linear.default, ATEN.matmul.default, ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default}

_LARGEST_NUMBER = 1e9


@dataclass(frozen=True)
class Parts:
    """The operators of one layer; `convs` is one convolution, or those of query, key and value."""

    rule: fx.Node
    convs: tuple[fx.Node, ...]
    norm: fx.Node

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """What the operators were given as it is: operands that no glue is above of."""
        inputs = [node for conv in self.convs for node in (*conv.args[:2], conv.kwargs.get("state"))]
        found = [node for node in inputs if isinstance(node, fx.Node)]
        return tuple(dict.fromkeys([*found, self.state, self.out_gate, self.norm_weight]))

    @property
    def state(self) -> fx.Node:
        """The state before the first token, as its owner keeps it."""
        return as_stored(self.rule.args[5])

    @property
    def out_gate(self) -> fx.Node:
        """The norm's gate before it was viewed by heads."""
        return as_stored(self.norm.args[1])

    @property
    def norm_weight(self) -> fx.Node:
        """The norm's weight."""
        return as_stored(self.norm.args[2])


def find_parts(flow: Dataflow, rule: fx.Node) -> Parts:
    """The parts around a delta rule.

    Raises:
        Mismatch: one is missing or of another kind, with the reason.
    """
    convs = tuple(dict.fromkeys(_conv_above(flow, rule.args[i], name) for i, name in enumerate(_VECTORS)))
    if len(convs) == 2:
        raise Mismatch("query, key and value share two convolutions; one for all or one for each is recognised")
    for conv in convs:
        if conv.kwargs.get("bias") is not None:
            raise Mismatch("its convolution has a bias")
        if conv.kwargs.get("activation", "silu") != "silu":
            raise Mismatch("its convolution has no SiLU")
        if conv.kwargs.get("actual_seq_lengths") is not None:
            raise Mismatch("its convolution counts valid tokens: a step with padding is left in parts")
    if len({_kind_of(conv) for conv in convs}) > 1:
        raise Mismatch("its convolutions differ in taps or dtypes, or not all of them have a state")
    norm = norm_below(flow, rule)
    if norm is None:
        raise Mismatch("no gated RMS norm that was fused reads its output")
    parts = Parts(rule, convs, norm)
    if parts.state in flow.constants:
        raise Mismatch("it begins without a state: it is no step of a decode")
    if flow.constants.intersection(parts.given):
        raise Mismatch("one of its operands is a constant of the graph")
    return parts


def _kind_of(conv: fx.Node) -> tuple[object, ...]:
    """What convolutions must have in common to be one: taps, dtypes of inputs and state."""
    x, weight = conv.args[:2]
    state = conv.kwargs.get("state")
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    before = value_of(state).dtype if isinstance(state, fx.Node) else None
    return shape_of(weight)[1], value_of(x).dtype, before


_VECTORS = ("query", "key", "value")


def has_parts(flow: Dataflow, rule: fx.Node) -> bool:
    """Whether a convolution is above the rule or a gated norm below: then a user would expect one operator.

    Nobody does where there is no state to begin with: that is a short prompt, and its parts are fused.
    """
    if rule.args[5] in flow.constants:
        return False
    above = any(convs_above(flow, node) for node in rule.args[:3] if isinstance(node, fx.Node))
    return above or norm_below(flow, rule) is not None


def _conv_above(flow: Dataflow, vector: object, name: str) -> fx.Node:
    assert isinstance(vector, fx.Node)
    convs = convs_above(flow, vector)
    if len(convs) != 1:
        count = f"{len(convs)} fused short convolutions" if convs else "no short convolution that was fused"
        raise Mismatch(f"its {name} comes from {count}")
    return convs[0]


def convs_above(flow: Dataflow, node: fx.Node) -> list[fx.Node]:
    """The convolutions that a value comes from by glue alone."""
    return [found for found in flow.in_order(flow.ancestors([node], stop=is_no_glue)) if str(found.target) == CONV]


def norm_below(flow: Dataflow, rule: fx.Node) -> fx.Node | None:
    """The gated norm that the rule's output goes into."""
    below = flow.descendants(results(rule, 0), stop=is_no_glue)
    norms = [node for node in flow.in_order(below) if str(node.target) == NORM and node.args[0] in below]
    return norms[0] if norms else None


def is_no_glue(node: fx.Node) -> bool:
    """Whether a node is more than arithmetic on each number, sums of squares and views."""
    if str(node.target).startswith("k31.") or node.op != "call_function":
        return True
    squares = node.target is ATEN.sum.dim_IntList and is_square(node.args[0])
    return node.target in _FETCHES or node.target in _MATRICES or (is_contraction(node) and not squares)


def is_square(node: object) -> bool:
    """Whether a node is a product of a value with itself."""
    return isinstance(node, fx.Node) and node.target is ATEN.mul.Tensor and node.args[0] is node.args[1]


def glue_above(flow: Dataflow, node: object) -> set[fx.Node]:
    """The glue that makes a value, itself included where it is glue."""
    assert isinstance(node, fx.Node)
    return {found for found in flow.ancestors([node], stop=is_no_glue) if not is_no_glue(found)}


def results(node: fx.Node, index: int) -> list[fx.Node]:
    """The getitem of one result of an operator, if anybody reads it."""
    return [user for user in node.users if user.op == "call_function" and user.args == (node, index)][:1]


def as_stored(node: object) -> fx.Node:
    """What a value was before views of all of it and casts that lose nothing."""
    assert isinstance(node, fx.Node)
    while _keeps_all(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def end_of_views(flow: Dataflow, node: fx.Node) -> fx.Node:
    """The last of the views that alone read the one before, all of it and in its dtype."""
    while True:
        readers = flow.users[node]
        if len(readers) != 1 or not _keeps_all(readers[0]) or value_of(readers[0]).dtype != value_of(node).dtype:
            return node
        node = readers[0]


def _keeps_all(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not is_float(node) or not is_float(source):
        return False
    if node.target in CASTS:
        return not is_narrowing(node)
    is_moved = is_view(node) and node.target not in COPIES and node.target is not ATEN.expand.default
    return is_moved and numel_of(source) == numel_of(node)


def constants_in(nodes: Sequence[fx.Node]) -> list[float]:
    """The numbers that stand in the arguments of some nodes."""
    arguments = [argument for node in nodes for argument in (*node.args, *node.kwargs.values())]
    numbers = [float(argument) for argument in arguments if isinstance(argument, int | float)]
    return list(dict.fromkeys(number for number in numbers if 0 < abs(number) < _LARGEST_NUMBER))


def letters_of(parts: Parts) -> dict[str, int]:
    """The sizes B, T, H, K, V and W by hints.

    Raises:
        Mismatch: the operands do not fit each other.
    """
    value, gate, beta = (node for node in parts.rule.args[2:5] if isinstance(node, fx.Node))
    batch, tokens, channels = shape_of(parts.convs[0].args[0])  # type: ignore[arg-type]
    rows = batch * tokens
    heads = numel_of(beta) // rows
    width, depth = numel_of(gate) // (rows * heads), numel_of(value) // (rows * heads)
    sizes = {"b": batch, "t": tokens, "h": heads, "k": width, "v": depth, "w": shape_of(parts.convs[0].args[1])[1]}  # type: ignore[arg-type]
    if shape_of(parts.norm)[-1] != depth:
        raise Mismatch("its norm is over another axis than the values of one head")
    if len(parts.convs) == 1 and channels != heads * (2 * width + depth):
        raise Mismatch(f"its convolution has {channels} channels, not those of query, key and value alone")
    return sizes
