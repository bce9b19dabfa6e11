"""The core of a KDA layer, from the convolution's inputs to the gated norm (K3.1 spec 2.3 to 2.6).

What the parts are, earlier passes have found. What stands between them, unit vectors, gates and beta, is anybody's
code: it is run, together with the parts.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from math import prod

from torch import fx

from k31compile.graph.confirm import Mismatch, Reading
from k31compile.graph.dataflow import Dataflow
from k31compile.graph.region import Region
from k31compile.graph.sizes import is_float, numel_of, shape_of
from k31compile.graph.views import CASTS, is_view
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.heads import Held, forms
from k31compile.passes.recognise.mega_parts import (
    RULE,
    Parts,
    constants_in,
    end_of_views,
    find_parts,
    glue_above,
    has_parts,
    is_no_glue,
    letters_of,
    results,
)
from k31compile.passes.recognise.mega_reading import MegaOperands, MegaReading
from k31compile.passes.recognise.operands import is_parameter

_MOST_READINGS = 64
_WITH_NUMBERS = ((0, "query"), (1, "key"), (3, "gate"), (4, "beta"))


class MegaKdaRecogniser(Recogniser):
    """Anchored on a fused step of the delta rule, with fused convolutions above and a fused gated norm below."""

    name = "mega_kda"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """Every kda_recurrent of the graph."""
        return [node for node in flow.nodes if str(node.target) == RULE]

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """From what the parts were given, and what the gates were made of, to the norm and the states."""
        parts = find_parts(flow, anchor)
        sizes = letters_of(parts)
        outputs = _outputs(flow, parts)
        core = _core(flow, parts, outputs)
        yield Demand(outputs, core, functools.partial(_may_be_leaf, sizes), parts.given, numel_of)

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, ...]]:
        """The leaves as found."""
        yield leaves

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """The leaves by what they are above of, and by shape; forms that fit alike are told apart by running."""
        parts = find_parts(flow, anchor)
        found = list(itertools.islice(_assignments(flow, parts, region), _MOST_READINGS))
        inside = set(region.nodes)
        made = {name: anchor.args[i] for i, name in _WITH_NUMBERS} | {"core": parts.norm.args[0]}
        numbers = {name: constants_in(flow.in_order(glue_above(flow, node) & inside)) for name, node in made.items()}
        for operands in found:
            yield MegaReading(region, parts, operands, numbers)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """Nobody else reads what is computed inside, and no operand depends on a result."""
        below = flow.descendants(region.outputs)
        if any(leaf in below for leaf in region.leaves):
            raise Mismatch("an operand of it depends on its result")
        weights = {leaf for leaf in region.leaves if is_parameter(leaf)}
        computed: set[fx.Node] = set()
        activations = set(region.leaves) - weights
        for node in region.nodes:
            above = set(flow.inputs[node])
            moves = is_view(node) or node.target in CASTS
            if above & computed or (above & activations and not moves):
                computed.add(node)
            elif above & activations:
                activations.add(node)
        for node, reader in outside_users(flow, computed, region.outputs).items():
            raise Mismatch(
                f"{node.name} {list(shape_of(node))}, a value inside the layer, is also read by {reader.name}"
                f"{' (returned)' if reader.op == 'output' else ''}"
            )

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """A step of the delta rule with at least one other part of the layer around it."""
        return has_parts(flow, anchor)

    def hint(self, reason: str) -> str:
        """What to change."""
        if "also read" in reason:
            return "read the layer's output and its states only"
        return (
            "the recognised layer is a short conv with SiLU, q and k through x * rsqrt(sum(x^2) + eps), log decay "
            "bound * sigmoid(exp(A) * (g + b)) or -exp(A) * softplus(g + b), sigmoid(beta), the step, a gated norm"
        )


def _outputs(flow: Dataflow, parts: Parts) -> tuple[fx.Node, ...]:
    """The normed rows, then the states that somebody keeps."""
    states = [node for node in results(parts.rule, 1) if node in flow.live]
    windows = [node for conv in parts.convs for node in results(conv, 1) if node in flow.live]
    return (end_of_views(flow, parts.norm), *(end_of_views(flow, state) for state in states), *windows)


def _core(flow: Dataflow, parts: Parts, outputs: tuple[fx.Node, ...]) -> frozenset[fx.Node]:
    """The parts, and the glue between and above them."""
    operators = {parts.rule, parts.norm, *parts.convs}
    given = set(parts.given)

    def is_beyond(node: fx.Node) -> bool:
        return node in given or (is_no_glue(node) and node not in operators)

    return frozenset(node for node in flow.ancestors(outputs, stop=is_beyond) if not is_beyond(node))


def _may_be_leaf(sizes: dict[str, int], node: fx.Node) -> bool:
    """Whether the node has the size of a gate, of its rate or bias, or of beta."""
    return is_float(node) and numel_of(node) in {prod(sizes[x] for x in of) for of in ("bthk", "bth", "hk", "h")}


def _assignments(flow: Dataflow, parts: Parts, region: Region) -> Iterator[MegaOperands]:
    """Every way to read the region's leaves and outputs by place and shape."""
    sizes, stop = letters_of(parts), set(region.leaves).__contains__
    gate, beta = parts.rule.args[3:5]
    above_gate, above_beta = (flow.ancestors([node], stop=stop) for node in (gate, beta) if isinstance(node, fx.Node))
    rest = [leaf for leaf in region.leaves if leaf not in parts.given]
    betas = [leaf for leaf in rest if leaf in above_beta]
    gates = [leaf for leaf in rest if leaf in above_gate]
    if len(betas) != 1 or len(betas) + len(gates) != len(rest) or not 2 <= len(gates) <= 3:
        return
    windows = [node for conv in parts.convs for node in results(conv, 1) if node in region.outputs]
    states = [node for node in region.outputs[1:] if node not in windows]
    # Where raw gate and bias have one size, what they are does not matter to the numbers: a weight is the bias.
    for raw, rate, *bias in sorted(itertools.permutations(gates), key=lambda order: is_parameter(order[0])):
        fields = [
            _held(raw, "bthk", sizes),
            _held(rate, "h", sizes),
            _held(bias[0], "hk", sizes) if bias else [None],
            _held(betas[0], "bth", sizes),
            _held_state(parts, parts.state, sizes),
            _held(parts.out_gate, "bthv", sizes),
            [*_held(parts.norm_weight, "v", sizes), *_held(parts.norm_weight, "hv", sizes)],
            _held(region.outputs[0], "bthv", sizes),
            _held_state(parts, states[0], sizes) if states else [None],
        ]
        for read in itertools.product(*fields):
            yield MegaOperands(tuple(windows), *read)  # type: ignore[arg-type]


def _held(node: fx.Node, letters: str, sizes: dict[str, int]) -> list[Held | None]:
    return [Held(node, form) for form in forms(node, letters, {letter: sizes[letter] for letter in letters})]


def _held_state(parts: Parts, node: fx.Node, sizes: dict[str, int]) -> list[Held | None]:
    """A state by its own order of keys and values; where that does not show, the likelier one first."""
    found: list[Held | None] = []
    for letters in ("bhvk", "bhkv") if parts.rule.kwargs.get("state_layout") == "VK" else ("bhkv", "bhvk"):
        for held in _held(node, letters, sizes):
            assert held is not None
            first, second = held.form.layout.dims[2:]
            if first is None or second is None or first < second:
                found.append(held)
    return found
