"""The check itself: catch the graphs of one call, run each three ways, compare."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from k31compile.backend import kept_whole
from k31compile.check.compare import compare_graph
from k31compile.check.distance import relative_error
from k31compile.check.result import CheckReport, judged
from k31compile.entry import Entry
from k31compile.errors import UsageError
from k31compile.graph.trace import trace_functional
from k31compile.options import Options
from k31compile.passes.pipeline import add_to_report, run_pipeline
from k31compile.report import Report
from k31compile.slices.leaf import LOOP

AGAINST = ("eager",)
MARK = "k31_check"


def check(entry: Entry, against: str = "eager") -> CheckReport:
    """Run one call of an entry through the passes and compare it stage by stage with float64.

    The entry's arguments and the model's buffers are left as they were. Ask the result for `.ok`, or call
    `.require_ok()`, which raises CheckError with the first stage beyond its bound.

    Raises:
        UsageError: nothing to compare with, by that name or on the meta device.
        TraceError: a graph of the call cannot be traced.
    """
    if against not in AGAINST:
        raise UsageError(f"there is nothing to check against called {against!r}", hint=f"known: {', '.join(AGAINST)}")
    tensors = [value for value in pytree.tree_leaves((entry.args, dict(entry.kwargs))) if _is_tensor(value)]
    if any(tensor.device.type == "meta" for tensor in tensors):
        raise UsageError("meta tensors have no values to check", where=entry.name, hint="k31 explain takes them")
    catcher = _Catcher()
    compiled = torch.compile(entry.model, backend=catcher, dynamic=False)
    try:
        written = _called(entry, entry.model)
        whole = kept_whole(entry.model, lambda compiled: _called(entry, compiled))
        outputs = _called(entry, compiled)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from error
    report = CheckReport(**vars(Report.merge(catcher.reports)))
    # Outputs of the graphs as written, run node by node, against the model's own code: is the trace itself right?
    worst = max(map(relative_error, outputs, written), default=0.0)
    if outputs and catcher.found:
        report.stages.append(judged("graphs against the model's code", "trace", 0.0, worst, outputs[0].dtype))
    report.stages.extend(stage for found in catcher.found for stage in found)
    report.notes += _of_whole(whole)
    return report


def _of_whole(leaves: Sequence[dict[str, Any]]) -> list[str]:
    """Say what a compile keeps whole and this check runs as it is written, so that it has no row."""
    if not leaves:
        return []
    counts: Counter[str] = Counter()
    for leaf in leaves:
        counts[f"{leaf['operator']} ({leaf['function']}, {leaf['where']})"] += leaf["calls"]
    listed = ", ".join(f"{count} x {what}" for what, count in counts.items())
    one = counts.total() == 1
    kept = "1 function or loop" if one else f"{counts.total()} functions and loops"
    note = (
        f"{kept} that a compile keeps whole {'was' if one else 'were'} traced as written: {listed}; a compile confirms "
        "by calling (k31 explain), here there is no row of it"
    )
    around = "; what stands around a loop over data runs outside of all graphs, and has no row either"
    return [note + (around if any(leaf["why"] == LOOP for leaf in leaves) else "")]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _called(entry: Entry, function: Callable[..., Any]) -> list[torch.Tensor]:
    """The floating outputs of one call on copies of the arguments; buffers that it changes are put back."""
    args, kwargs = copy.deepcopy((entry.args, dict(entry.kwargs)))
    restore = _buffers_of(entry.model)
    try:
        with torch.no_grad(), entry.grad_mode() if entry.mode != "grad" else torch.no_grad():
            result = function(*args, **kwargs)
    finally:
        restore()
    return [value.clone() for value in pytree.tree_leaves(result) if _is_tensor(value) and value.is_floating_point()]


def _buffers_of(model: Any) -> Callable[[], None]:
    """Remember the buffers of a model, and return what puts them back: the same tensors with the same values."""
    held = [
        (module, name, buffer, buffer.clone())
        for module in (model.modules() if isinstance(model, nn.Module) else ())
        for name, buffer in module.named_buffers(recurse=False)
    ]

    def restore() -> None:
        with torch.no_grad():
            for module, name, buffer, value in held:
                module._buffers[name] = buffer.copy_(value)

    return restore


class _Catcher:
    """A backend that rewrites each graph as k31 does and, when it runs, compares it; results are those of eager."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.found: list[list[Any]] = []

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        traced = trace_functional(module, example_inputs)
        for node in traced.graph.nodes:
            node.meta[MARK] = node.name
        options = Options(codegen="ops")
        rewritten, stages = run_pipeline(traced, options, "cpu")
        report = _reported(traced, rewritten)
        add_to_report(report, stages)
        self.reports.append(report)

        def run(*inputs: Any) -> Any:
            outputs, found = compare_graph(traced, rewritten, inputs, MARK)
            self.found.append(found)
            return outputs

        return run


def _reported(traced: fx.GraphModule, rewritten: fx.GraphModule) -> Report:
    from k31compile.contract.census import count_contained, count_fused
    from k31compile.targets.cpu import providers

    fused, contains = dict(count_fused(rewritten)), dict(count_contained(rewritten))
    before, after = len(traced.graph.nodes), len(rewritten.graph.nodes)
    return Report(fused, contains, nodes_before=before, nodes_after=after, providers=providers(fused))
