"""Run the passes: each on a copy, checked afterwards, undone where it broke an invariant."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from k31compile.errors import InvariantError, StrictError
from k31compile.graph.confirm import byte_budget
from k31compile.graph.invariants import check_invariants, take_snapshot
from k31compile.graph.memory import remembering
from k31compile.options import Options
from k31compile.passes.registry import Pass, PassResult, all_passes
from k31compile.report import PassRun, Report


@dataclass(frozen=True)
class Stage:
    """One pass as it ran on one graph."""

    run: PassRun
    result: PassResult
    undone: str = ""


class _Broken(Exception):
    """A pass that must be undone: its name and the reason."""


def run_pipeline(module: fx.GraphModule, options: Options, target: str) -> tuple[fx.GraphModule, list[Stage]]:
    """The graph after all passes that apply, and what each did; `module` stays as it is.

    A pass that raises or breaks an invariant is undone and the others go on; under `strict` that is an error.

    Raises:
        StrictError: a pass was undone, or a fusion was missed by one condition, under `strict=True`.
    """
    passes = [
        one for one in all_passes() if ("all" in one.targets or target in one.targets) and options.fuses(one.fusion)
    ]
    undone: dict[str, str] = {}
    with remembering(stored=options.cache is not False):
        while True:
            try:
                return _run_all(module, passes, options, undone)
            except _Broken as broken:
                name, why = broken.args
                undone[name] = f"pass {name} was undone: {why}"


def _run_all(
    module: fx.GraphModule, passes: Sequence[Pass], options: Options, undone: Mapping[str, str]
) -> tuple[fx.GraphModule, list[Stage]]:
    """All passes in place on one copy, those in `undone` left out: to undo one is to begin again without it."""
    if not passes:
        return module, []
    stages: list[Stage] = []
    # Between passes nobody calls the module, so nobody writes its code.
    with _use_lazy_graph_module(True), byte_budget(options.confirm_bytes):
        work = copy_module(module)
        for one in passes:
            if one.name in undone:
                stage = Stage(PassRun(one.name, 0.0, 0, one.numerics), PassResult(), undone[one.name])
            else:
                stage = _run_one(one, work, options)
            stages.append(stage)
            _hold_strict(stage, options)
    finished = fx.GraphModule(work, work.graph)
    finished.meta.update(work.meta)
    return finished, stages


def _run_one(one: Pass, work: fx.GraphModule, options: Options) -> Stage:
    start = time.perf_counter()
    before = take_snapshot(work)
    try:
        result = one.run(work, options)
        if result.changed or not before.is_current(work.graph):
            check_invariants(before, work, one.name)
    except InvariantError as error:
        raise _Broken(one.name, error.what) from error
    except Exception as error:
        # A defect of ours must not cost the user the compile; it is told, and under strict it raises.
        raise _Broken(one.name, f"{type(error).__name__}: {error}") from error
    return Stage(PassRun(one.name, time.perf_counter() - start, result.changed, one.numerics), result)


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph that shares its attributes and fake values."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, values, return_output_node=True)
    assert isinstance(output, tuple)
    result, old_output = output
    node = graph.output(result)
    node.meta.update(old_output.meta)
    copied = _make_graph_module(module, graph)
    copied.meta.update(module.meta)
    return copied


def _hold_strict(stage: Stage, options: Options) -> None:
    if not options.strict:
        return
    if stage.undone:
        raise StrictError(stage.undone)
    for refusal in stage.result.refused:
        if refusal.near_miss:
            raise StrictError(f"a near miss: {refusal.name}: {refusal.reason}", where=refusal.where, hint=refusal.hint)


def add_to_report(report: Report, stages: list[Stage]) -> None:
    """Write what the passes did into a report."""
    for stage in stages:
        report.passes.append(stage.run)
        report.refused.extend(stage.result.refused)
        report.confirmations.extend(c.to_dict() for c in stage.result.confirmations)
        if stage.undone:
            report.notes.append(stage.undone)
