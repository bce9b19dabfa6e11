"""The router of a mixture of experts in anyone's spelling: who is chosen, and with what weight (K3.1 spec 2.18).

score = sigmoid(logits) or softmax(logits);  the k best of score + bias;  their scores, renormalised, times a factor
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from k31compile.graph.confirm import Mismatch, Reading
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.region import Region
from k31compile.graph.sizes import is_float, numel_of, shape_of
from k31compile.passes.recognise.contractions import is_contraction, nearest_contractions, operands
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.gating_reading import GatingReading
from k31compile.passes.recognise.operands import weight_operands
from k31compile.passes.recognise.rounds import is_round, rounds_of
from k31compile.passes.recognise.selection import Selection, is_selection, selection_of

# The best words of a vocabulary are chosen by a top-k and a softmax too.
_MOST_EXPERTS = 4096
_MOST_EXITS = 6
_MOST_FIRST = 2
_SCORES = {
    ATEN.sigmoid.default,
    ATEN.special_expit.default,
    ATEN.softmax.int,
    ATEN._softmax.default,
    ATEN.exp.default,
}
_COMPARISONS = {ATEN.ge.Tensor, ATEN.lt.Tensor, ATEN.le.Tensor, ATEN.gt.Tensor}


class MoeGatingRecogniser(Recogniser):
    """Anchored on a selection along the last dimension whose experts get weights, side by side or in a row of all."""

    name = "moe_gating_top_k"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The later selections first: what ranks groups stands before what chooses experts."""
        return [node for node in reversed(flow.nodes) if is_selection(node) or is_round(node)]

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """From the scores to the experts and their weights, the last node of the weights' shape first."""
        selection = _selection(flow, anchor)
        if selection is None:
            if _is_threshold(flow, anchor):
                raise Mismatch(
                    "its mask keeps every expert that ties with the last of the best, the operator k of them"
                )
            return
        found, exits = False, _exits(flow, selection)
        for weights in exits:
            outputs = (weights, selection.final)
            scores = _score_functions(flow, (weights, selection.scores), numel_of(selection.scores))
            if not scores:
                continue
            found = True
            core = flow.between([*scores, anchor], outputs) | set(outputs)
            eligible = functools.cache(functools.partial(_may_be_leaf, shape_of(selection.scores)))
            yield Demand(outputs, frozenset(core), eligible)
        if exits and not found:
            raise Mismatch("its scores are neither a sigmoid nor a softmax")

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, ...]]:
        """The logits before their sign was turned for 1 / (1 + exp(-x)), then as found."""
        turned = tuple(_behind_sign(leaf) for leaf in leaves)
        if turned != leaves:
            yield turned
        yield leaves

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """Logits and bias are told apart by shape, and by running where there is one row."""
        selection = _selection(flow, anchor)
        assert selection is not None
        experts, ranks = shape_of(selection.scores)[-1], {len(shape_of(output)) for output in region.outputs}
        if len(region.leaves) > 2 or not all(is_float(leaf) for leaf in region.leaves):
            return
        for logits in region.leaves:
            shape = shape_of(logits)
            if numel_of(logits) == numel_of(selection.scores) and len(shape) > 1 and ranks <= {2, len(shape)}:
                biases = [leaf for leaf in region.leaves if leaf is not logits]
                if all(numel_of(bias) == experts for bias in biases):
                    yield GatingReading(region, selection, logits, biases[0] if biases else None)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """Weights and experts come from one choice: nobody reads a weight that the author's top-k gave."""
        assert isinstance(reading, GatingReading)
        chosen, most = flow.descendants([reading.selection.anchor]), max(map(numel_of, region.outputs))
        for node, reader in outside_users(flow, region.nodes, region.outputs).items():
            if node in chosen and numel_of(node) <= most:
                raise Mismatch(f"{node.name}, a weight before it is finished, is also read by {reader.name}")

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """The scores come from a product with a weight, as a router's do."""
        selection = _selection(flow, anchor)
        if selection is None:
            return _is_threshold(flow, anchor)
        near = nearest_contractions(flow, [selection.scores])
        return bool(near) and _are_weighted(flow, near)

    def hint(self, reason: str) -> str:
        """What to change."""
        if "also read" in reason:
            return "use only the finished weights"
        if "ties" in reason:
            return "choose by the indices of the top-k: zeros.scatter(-1, indices, weights)"
        return "the recognised form is s = sigmoid(x); e = topk(s + bias); w = s[e] / (sum s[e] + eps) * factor"


def _selection(flow: Dataflow, node: fx.Node) -> Selection | None:
    """The selection of at most a few of some experts at `node`, along the last dimension."""
    selection = rounds_of(flow, node) if is_round(node) else selection_of(flow, node)
    if selection is None or not isinstance(selection.count, int):
        return None
    shape = shape_of(selection.scores)
    fits = len(shape) > 1 and selection.dim == len(shape) - 1 and shape[-1] <= _MOST_EXPERTS
    return selection if fits and selection.largest else None


def _is_threshold(flow: Dataflow, node: fx.Node) -> bool:
    """Whether a router's scores are compared with values of their own top-k, whose places nobody reads."""
    if node.target is not ATEN.topk.default or any(user.args[1] == 1 for user in flow.users[node]):
        return False
    scores = node.args[0]
    assert isinstance(scores, fx.Node)
    shape = shape_of(scores)
    if len(shape) < 2 or shape[-1] > _MOST_EXPERTS or not _are_weighted(flow, nearest_contractions(flow, [scores])):
        return False
    values = flow.descendants([node], stop=lambda one: one.target in _COMPARISONS)
    compared = [one for one in values if one.target in _COMPARISONS and scores in flow.inputs[one]]
    score_functions = _score_functions(flow, [scores], numel_of(scores))
    return bool(compared and score_functions)


def _are_weighted(flow: Dataflow, contractions: Iterable[fx.Node]) -> bool:
    """Whether all of some products have a weight."""
    weights = weight_operands(flow)
    return all(weights.intersection(operands(node)) for node in contractions)


def _exits(flow: Dataflow, selection: Selection) -> list[fx.Node]:
    """Weights of the experts' shape; then rows over all experts, where no product of activations is chosen from."""
    exits = _exits_of(flow, selection, shape_of(selection.final))
    if _are_weighted(flow, nearest_contractions(flow, [selection.scores])):
        exits += _exits_of(flow, selection, shape_of(selection.scores))
    return list(dict.fromkeys(exits))


def _exits_of(flow: Dataflow, selection: Selection, shape: Sequence[int]) -> list[fx.Node]:
    """Floats of a shape on the way of all weights from the selection, the last first."""
    anchor = selection.anchor
    # As far as one-hot rows of the chosen reach; what experts compute is larger.
    limit = numel_of(selection.final) * shape_of(selection.scores)[selection.dim]
    near = {anchor, *flow.users[anchor]}
    start = [anchor, selection.final]
    reached = flow.descendants(start, stop=lambda node: node not in near and numel_of(node) > limit)
    exits = flow.in_order(n for n in reached if is_float(n) and shape_of(n) == shape and n in flow.live)
    first: list[fx.Node] = []
    for node in exits:
        if not any(other in flow.ancestors([node], stop=lambda n: n is anchor) for other in first):
            first.append(node)
        if len(first) == _MOST_FIRST:
            break
    chains = [[node, *itertools.takewhile(exits.__contains__, _narrow(flow, node, shape))] for node in first]
    return [node for chain in chains for node in reversed(chain[:_MOST_EXITS])]


def _narrow(flow: Dataflow, node: fx.Node, shape: Sequence[int]) -> Iterator[fx.Node]:
    """What everything made of a weight goes through, of the weights' shape: sums between are passed by."""
    return (after for after in flow.post_dominators(node) if is_float(after) and shape_of(after) == shape)


def _score_functions(flow: Dataflow, starts: Iterable[fx.Node], widest: int) -> list[fx.Node]:
    """The sigmoids, softmaxes and exponentials met first on every way up, before any product with a weight."""
    found: list[fx.Node] = []
    seen: set[fx.Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in seen or node in flow.constants or numel_of(node) > widest:
            continue
        seen.add(node)
        if node.target in _SCORES:
            found.append(node)
        elif not is_contraction(node) or not _has_weight(flow, node):
            todo.extend(flow.inputs[node])
    return found


def _has_weight(flow: Dataflow, node: fx.Node) -> bool:
    return node.target is ATEN.linear.default or bool(weight_operands(flow).intersection(operands(node)))


def _behind_sign(leaf: fx.Node) -> fx.Node:
    source = leaf.args[0] if leaf.target is ATEN.neg.default else leaf
    return source if isinstance(source, fx.Node) else leaf


def _may_be_leaf(scores: Sequence[int], node: fx.Node) -> bool:
    """Whether the shape is that of logits, or of one number for each expert."""
    shape = shape_of(node)
    if not is_float(node) or not shape or shape[-1] != scores[-1]:
        return False
    rows = 1
    for size in scores[:-1]:
        rows *= size
    return numel_of(node) in (scores[-1], rows * scores[-1])
