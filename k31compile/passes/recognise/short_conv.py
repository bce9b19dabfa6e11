"""The short causal convolution per channel in anyone's spelling (K3.1 spec 2.6, 3.7).

y[t, c] = SiLU(sum_i weight[c, i] window[t + i, c] + bias[c]),  window = the inputs before and x
"""

from collections.abc import Iterable, Iterator
from functools import partial

from torch import fx

from k31compile.graph.confirm import Mismatch, Reading
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.region import Region
from k31compile.graph.sizes import is_float, is_integer, numel_of, shape_of
from k31compile.graph.views import CASTS, is_view
from k31compile.passes.recognise.conv_reading import ConvReading, assignments
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.operands import with_plain_integers
from k31compile.passes.recognise.taps import Taps, ends_of, find_taps, is_padded_in_front, kept_from, shifted, wide
from k31compile.passes.recognise.token_taps import unrolled_from

_ACTIVATIONS = {ATEN.silu.default, ATEN.sigmoid.default, ATEN.exp.default}
_MOST_READINGS = 48


class ShortConvRecogniser(Recogniser):
    """Anchored on what adds up the products of inputs with the taps of their channel."""

    name = "short_conv"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """Convolutions with a group for each channel, contractions over taps, sums of shifted products."""
        return [taps.anchor for taps in _found(flow)]

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """From the inputs, before they are shifted, to the activation; with the state where it is kept."""
        taps = _taps_of(flow, anchor)
        tokens = unrolled_from(flow, _found(flow), taps)
        if tokens is not None:
            for end in tokens.ends:
                whole = tokens.picked | tokens.moving | flow.between(tokens.starts, [end])
                yield Demand((end,), frozenset(whole), partial(_may_be_leaf, taps, end), capacity=numel_of)
        moving, windows = shifted(flow, taps)
        for end in ends_of(flow, taps):
            eligible = partial(_may_be_leaf, taps, end)
            core = {*taps.picked, *flow.between([anchor], [end])}
            inside = core | moving
            for window in windows:
                around = inside | flow.between([window], [end])
                for kept in kept_from(flow, window, around, partial(_may_be_state, taps, end, (taps.count - 1,))):
                    longest = around | flow.between([window], [kept])
                    yield Demand((end, kept), frozenset(longest), eligible, capacity=numel_of)
            for nodes in (inside, core) if moving else (core,):
                yield Demand((end,), frozenset(nodes), eligible, capacity=numel_of)

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, ...]]:
        """The leaves as they were first written, also before a flip of the taps, then as found."""
        found = with_plain_integers(leaves)
        tried: set[tuple[fx.Node, ...]] = set()
        for flips in (False, True):
            before = tuple(dict.fromkeys(_as_first_written(leaf, flips) for leaf in found))
            if before not in tried and len(before) == len(found):
                tried.add(before)
                yield before
        if found not in tried:
            yield found

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """Leaves by shape; the region has an activation or it has none."""
        taps = _taps_of(flow, anchor)
        activation = "silu" if any(node.target in _ACTIVATIONS for node in region.nodes) else "none"
        for count, operands in enumerate(assignments(region, taps.channels, taps.count)):
            if count == _MOST_READINGS:
                return
            yield ConvReading(region, operands, activation)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """Nobody else reads the sum before its activation; whoever reads the window keeps reading it."""
        weight = reading.operands.weight.leaf  # type: ignore[attr-defined]
        below = flow.descendants([weight])
        for node, reader in outside_users(flow, region.nodes, region.outputs).items():
            if node in below and numel_of(node) >= numel_of(region.outputs[0]) and not is_view(node):
                raise Mismatch(f"{node.name}, a value inside the convolution, is also read by {reader.name}")

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """A sum over taps whose inputs have something in front, be it zeros."""
        taps = _taps_of(flow, anchor)
        longer = [numel_of(window) - numel_of(anchor) for window in shifted(flow, taps)[1]]
        in_front = {b * kept * taps.channels for b in _batches(taps, anchor) for kept in (taps.count - 1, taps.count)}
        return is_padded_in_front(taps) or not in_front.isdisjoint(longer)

    def hint(self, reason: str) -> str:
        """What to change."""
        return "the recognised form is silu(conv1d(cat(state, x), weight, groups=channels)); its state the last inputs"


def _found(flow: Dataflow) -> list[Taps]:
    return flow.remember("taps", lambda: find_taps(flow))


def _taps_of(flow: Dataflow, anchor: fx.Node) -> Taps:
    return next(taps for taps in _found(flow) if taps.anchor is anchor)


def _may_be_leaf(taps: Taps, end: fx.Node, node: fx.Node) -> bool:
    """Whether the node has the sizes of x, of the weight, of a bias, of a state or of lengths."""
    if is_integer(node):
        return len(shape_of(node)) > 0 and numel_of(node) in _batches(taps, end)
    if not is_float(node):
        return False
    sizes = wide(node)
    if sizes in (wide(end), wide(taps.weight), [taps.channels]):
        return True
    return _may_be_state(taps, end, (taps.count - 1, taps.count), node)


def _batches(taps: Taps, end: fx.Node) -> list[int]:
    """What the batch may be: a size of the result that is not its channels, or one."""
    rest = wide(end)
    if taps.channels in rest:
        rest.remove(taps.channels)
    return [*rest, 1]


def _may_be_state(taps: Taps, end: fx.Node, lengths: Iterable[int], node: fx.Node) -> bool:
    wanted = [
        sorted(s for s in (b, length, taps.channels) if s != 1) for b in _batches(taps, end) for length in lengths
    ]
    return wide(node) in wanted


def _as_first_written(leaf: fx.Node, flips: bool) -> fx.Node:
    """What a leaf was before views and casts that left its sizes as they are, or also before a flip."""
    node = leaf
    while is_float(node) and (is_view(node) or node.target in CASTS or (flips and node.target is ATEN.flip.default)):
        source = node.args[0]
        if not isinstance(source, fx.Node) or not is_float(source) or wide(source) != wide(node):
            break
        node = source
    return node
