"""Attention over depth in anyone's spelling (K3.1 spec 2.2): a softmax over a few block sums of each token.

h = sum_i softmax_i(<query, v_i> rsqrt(mean(v_i^2) + eps)) v_i
"""

import functools
from collections.abc import Iterable, Iterator

from torch import fx

from k31compile.graph.confirm import Reading
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.region import Region
from k31compile.graph.sizes import is_float, numel_of, shape_of
from k31compile.passes.recognise.depth_anchor import SDPA, SOFTMAXES, Depth, depth_anchors, depths
from k31compile.passes.recognise.depth_reading import depth_readings
from k31compile.passes.recognise.engine import Demand, Recogniser

_MOST_OUTPUTS, _MOST_NODES, _MOST_READINGS = 3, 400, 48


class AttentionResidualsRecogniser(Recogniser):
    """Anchored on the weights.

    `name` is attn_res_update where one source is a running sum, attn_res_prepare where all lie in one bank.
    """

    def __init__(self, name: str) -> None:
        """Look for one of the two forms."""
        self.name = name
        self.has_partial = name == "attn_res_update"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """Softmaxes, attentions and exponentials that may weigh a few rows by their root mean squares."""
        return flow.remember("depth anchors", lambda: depth_anchors(flow))

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """From the sources to the mixture; besides them only vectors as wide as a row."""
        for depth in self._depths(flow, anchor):
            sources = set(depth.sources)
            inner = flow.ancestors([depth.out], stop=sources.__contains__) - sources
            if len(inner) > _MOST_NODES or not inner.issuperset(depth.roots):
                continue
            below = flow.descendants([*depth.roots, *depth.starts], stop=frozenset([depth.out]).__contains__)
            core = frozenset((below & inner) | {depth.out})
            lower = flow.descendants(depth.sources)
            eligible = functools.partial(_may_be_a_vector, depth.width, lower)
            yield Demand((_with_cast(flow, depth.out),), core, eligible, depth.sources)

    def _depths(self, flow: Dataflow, anchor: fx.Node) -> list[Depth]:
        def find() -> list[Depth]:
            found: list[Depth] = []
            for depth in depths(flow, anchor):
                if len(found) < _MOST_OUTPUTS:
                    found.append(depth)
            return found

        found = flow.remember(f"depths of {anchor.name}", find)
        return [depth for depth in found if _has_partial(depth) == self.has_partial]

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterable[tuple[fx.Node, ...]]:
        """The leaves as the cut found them."""
        return (leaves,)

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """The sources are known; eps, scale and where a bank counts its blocks are told by running."""
        for depth in self._depths(flow, anchor):
            if _with_cast(flow, depth.out) is region.outputs[0]:
                for count, reading in enumerate(depth_readings(self.name, flow, region, depth.sources)):
                    if count == _MOST_READINGS:
                        return
                    yield reading

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """Nothing more: the output is passed by everything that reads the weights."""

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """A softmax, or an attention, with as many weights as there are sources."""
        is_weight = anchor.target in SOFTMAXES or anchor.target is SDPA
        return is_weight and bool(self._depths(flow, anchor))

    def hint(self, reason: str) -> str:
        """What to change."""
        return "the recognised form is h = sum_i softmax_i(<query, v_i> rsqrt(mean(v_i^2) + eps)) v_i"


def _may_be_a_vector(width: int, lower: set[fx.Node], node: fx.Node) -> bool:
    """Whether a value has as many numbers as a row and does not depend on the sources."""
    return is_float(node) and numel_of(node) == width and shape_of(node)[-1] == width and node not in lower


def _has_partial(depth: Depth) -> bool:
    return any(numel_of(source) == numel_of(depth.out) for source in depth.sources)


def _with_cast(flow: Dataflow, out: fx.Node) -> fx.Node:
    """The output after a cast that alone reads it: the operator rounds by itself."""
    users = flow.users[out]
    return users[0] if len(users) == 1 and users[0].target is ATEN._to_copy.default and is_float(users[0]) else out
