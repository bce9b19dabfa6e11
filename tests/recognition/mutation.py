"""One node of a traced graph changed at a time, and what the recogniser then says (K3.1 recognition notes, 6).

A mutant that is refused is killed. One that is accepted must give what the operator gives, on fresh inputs: then it
is equivalent. Anything else is a false positive, the worst that a recogniser can do.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from stable_topk import stable_eager
from torch import fx

from k31compile.graph.memory import MEMORY
from k31compile.graph.trace import trace_functional
from k31compile.passes.pipeline import copy_module
from k31compile.passes.recognise.engine import recognise

ATEN = torch.ops.aten
INF = float("inf")

_SWAPS = {
    ATEN.relu.default: (ATEN.relu6.default, ATEN.gelu.default, ATEN.leaky_relu.default, ATEN.abs.default),
    ATEN.mul.Tensor: (ATEN.add.Tensor, ATEN.div.Tensor),
    ATEN.add.Tensor: (ATEN.sub.Tensor, ATEN.mul.Tensor),
    ATEN.div.Tensor: (ATEN.mul.Tensor,),
    ATEN.le.Tensor: (ATEN.lt.Tensor, ATEN.ge.Tensor),
    ATEN.lt.Tensor: (ATEN.le.Tensor,),
    ATEN.gt.Tensor: (ATEN.ge.Tensor, ATEN.lt.Tensor, ATEN.ne.Tensor),
    ATEN.ge.Tensor: (ATEN.gt.Tensor,),
    ATEN.lt.Scalar: (ATEN.le.Scalar, ATEN.gt.Scalar),
    ATEN.ge.Scalar: (ATEN.gt.Scalar,),
    ATEN.eq.Scalar: (ATEN.ne.Scalar,),
    ATEN.bitwise_and.Tensor: (ATEN.bitwise_or.Tensor, ATEN.bitwise_xor.Tensor),
    ATEN.bitwise_or.Tensor: (ATEN.bitwise_and.Tensor, ATEN.bitwise_xor.Tensor),
    ATEN.logical_and.default: (ATEN.logical_or.default,),
    ATEN.exp.default: (ATEN.sigmoid.default, ATEN.expm1.default),
    ATEN.softmax.int: (ATEN.log_softmax.int,),
    ATEN.maximum.default: (ATEN.minimum.default,),
}
_FILLS = {ATEN.masked_fill.Scalar, ATEN.scatter.value, ATEN.full.default, ATEN.where.ScalarOther}


@dataclass(frozen=True)
class Mutant:
    """A changed graph, and in words what was changed."""

    name: str
    module: fx.GraphModule


def traced(fn, args):
    """The functional graph that the passes are given, and the order in which it takes the arguments."""
    kept = []

    def keep(module, inputs):
        kept.append(trace_functional(module, inputs))
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=keep)(*args)
    (module,) = kept
    return module, _order(module, fn)


def _order(module, fn):
    """Which argument of `fn` each input of the graph is: Dynamo lists them by first use."""
    names = list(inspect.signature(fn).parameters)
    sources = [node.meta["source_name"] for node in module.graph.find_nodes(op="placeholder")]
    return [names.index(source.removeprefix("l_").removesuffix("_")) for source in sources]


def mutants(module: fx.GraphModule, nodes: set[str]) -> Iterator[Mutant]:
    """The graph as it is, then every change of one of `nodes`, which are names."""
    yield Mutant("unchanged", copy_module(module))
    for node in module.graph.nodes:
        if node.name in nodes and node.op == "call_function":
            for label, change in _changes(node):
                changed = copy_module(module)
                change(changed, next(n for n in changed.graph.nodes if n.name == node.name))
                changed.graph.eliminate_dead_code()
                changed.recompile()
                yield Mutant(f"{node.name}:{label}", changed)


def _changes(node: fx.Node) -> Iterator[tuple[str, Callable]]:
    value = node.meta.get("val")
    for target in _SWAPS.get(node.target, ()):
        yield f"{target}", _swap(target)
    yield from _constants(node)
    if not isinstance(value, torch.Tensor):
        return
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if source is not None and _alike(source.meta.get("val"), value):
        yield "dropped", lambda module, n: n.replace_all_uses_with(n.args[0])
    for label, function in _afterwards(value):
        yield label, _insert(function)


def _constants(node: fx.Node) -> Iterator[tuple[str, Callable]]:
    for i, argument in enumerate(node.args):
        if isinstance(argument, float) or (node.target in _FILLS and isinstance(argument, int) and i >= 2):
            for new in [0.0, -5.0, 1.0] if abs(argument) > 1e9 else [argument * 1.01, argument + 1.0, -argument]:
                new_value = type(argument)(new) if isinstance(argument, float) else int(new)
                if new_value != argument and not isinstance(argument, bool):
                    yield f"argument {i} {argument} -> {new_value}", _set(i, new_value)
        if isinstance(argument, bool):
            yield f"argument {i} {argument} -> {not argument}", _set(i, not argument)
    if node.target is ATEN.softmax.int:
        for dim in range(-len(node.meta["val"].shape), -1):
            yield f"dim {dim}", _set(1, dim)
    if node.target in (ATEN.topk.default,) and len(node.args) < 4:
        yield "smallest", lambda module, n: setattr(n, "args", (*n.args[:2], -1, False))


def _afterwards(value: torch.Tensor) -> Iterator[tuple[str, Callable]]:
    rolls = [d for d in range(value.dim()) if isinstance(value.shape[d], int) and value.shape[d] > 1]
    if value.dtype == torch.bool:
        yield "then not", (ATEN.logical_not.default,)
    elif value.dtype.is_floating_point:
        yield "then * 1.01", (ATEN.mul.Tensor, 1.01)
        yield "then * -1", (ATEN.mul.Tensor, -1.0)
        yield "then + 0.01", (ATEN.add.Tensor, 0.01)
        yield "then clamp 7", (ATEN.clamp.default, -7.0, 7.0)
    else:
        yield "then + 1", (ATEN.add.Tensor, 1)
        yield "then clamp 3", (ATEN.clamp.default, None, 3)
    for dim in rolls:
        yield f"then roll {dim}", (ATEN.roll.default, [1], [dim])


def _swap(target):
    def change(module, node):
        node.target = target
        if target is ATEN.log_softmax.int:
            node.args = node.args[:2]

    return change


def _set(i, new):
    def change(module, node):
        node.args = (*node.args[:i], new, *node.args[i + 1 :])

    return change


def _insert(function):
    def change(module, node):
        with module.graph.inserting_after(node):
            after = module.graph.call_function(function[0], (node, *function[1:]))
        after.meta = dict(node.meta)
        node.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)

    return change


def _alike(left, right):
    return isinstance(left, torch.Tensor) and left.shape == right.shape and left.dtype == right.dtype


class Steady(fx.Interpreter):
    """Runs a graph with top-k and sorts stable."""

    def call_function(self, target, args, kwargs):
        if target is ATEN.topk.default:
            return stable_eager(torch.topk, *args, **kwargs)
        if target in (ATEN.sort.default, ATEN.argsort.default):
            function = torch.sort if target is ATEN.sort.default else torch.argsort
            return stable_eager(function, *args, **kwargs)
        return super().call_function(target, args, kwargs)


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: "killed", "equivalent", "broken" (the mutant itself does not run) or "FALSE"."""

    name: str
    fate: str
    detail: str = ""


def judge(mutant: Mutant, recogniser, fresh: list[tuple], remember: bool = False) -> Verdict:
    """Recognise the mutant and, where it is accepted, compare it with what it was rewritten to."""
    if not remember:
        MEMORY.forget()
    rewritten = copy_module(mutant.module)
    try:
        findings = recognise(rewritten, recogniser)
    except Exception as error:
        return Verdict(mutant.name, "killed", f"raised {type(error).__name__}: {error}")
    if not findings.fused:
        return Verdict(mutant.name, "killed", "; ".join(str(r) for r in findings.refused))
    rewritten.recompile()
    ran = 0
    for args in fresh:
        try:
            want = Steady(mutant.module).run(*args)
        except Exception:  # a mutant that torch or an operator refuses is no program
            continue
        ran += 1
        got = Steady(rewritten).run(*args)
        difference = _difference(got, want)
        if difference:
            return Verdict(mutant.name, "FALSE", difference)
    return Verdict(mutant.name, "equivalent" if ran else "broken")


def _difference(got, want) -> str:
    for left, right in zip(_tensors(got), _tensors(want), strict=True):
        if not right.dtype.is_floating_point:
            rows = (left.sort(-1).values != right.sort(-1).values).any(-1)
            if bool(rows.any()):
                return f"{int(rows.sum())} of {rows.numel()} rows select otherwise"
            continue
        live = right.isfinite().all(-1)
        error = (
            float((left - right)[live].abs().max() / right[live].abs().max().clamp_min(1e-300)) if live.any() else 0.0
        )
        if not error < 1e-8:
            return f"relative error {error:.1e}"
    return ""


def _tensors(value):
    return [value] if isinstance(value, torch.Tensor) else [v for v in value if isinstance(v, torch.Tensor)]
