"""Run the passes: each on a copy, checked afterwards, undone where it broke an invariant."""

import time
from dataclasses import dataclass

from torch import fx

from k31compile.errors import InvariantError, StrictError
from k31compile.graph.invariants import check_invariants
from k31compile.options import Options
from k31compile.passes.registry import Pass, PassResult, all_passes
from k31compile.report import PassRun, Report


@dataclass(frozen=True)
class Stage:
    """One pass as it ran on one graph."""

    run: PassRun
    result: PassResult
    undone: str = ""


def run_pipeline(module: fx.GraphModule, options: Options, target: str) -> tuple[fx.GraphModule, list[Stage]]:
    """The graph after all passes that apply, and what each did.

    A pass that raises or breaks an invariant is undone and the others go on; under `strict` that is an error.

    Raises:
        StrictError: a pass was undone, or a fusion was missed by one condition, under `strict=True`.
    """
    stages: list[Stage] = []
    for one in all_passes():
        if ("all" in one.targets or target in one.targets) and options.fuses(one.fusion):
            module, stage = _run_one(one, module, options)
            stages.append(stage)
            _hold_strict(stage, options)
    return module, stages


def _run_one(one: Pass, module: fx.GraphModule, options: Options) -> tuple[fx.GraphModule, Stage]:
    start = time.perf_counter()
    candidate = copy_module(module)
    undone = ""
    try:
        result = one.run(candidate, options)
        if result.changed:
            check_invariants(module, candidate, one.name)
            candidate.recompile()
            module = candidate
    except InvariantError as error:
        result, undone = PassResult(), f"pass {one.name} was undone: {error.what}"
    except Exception as error:
        # A defect of ours must not cost the user the compile; it is told, and under strict it raises.
        result, undone = PassResult(), f"pass {one.name} was undone: {type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return module, Stage(PassRun(one.name, seconds, result.changed, one.numerics), result, undone)


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph that shares its attributes and fake values."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, values, return_output_node=True)
    assert isinstance(output, tuple)
    result, old_output = output
    node = graph.output(result)
    node.meta.update(old_output.meta)
    copied = fx.GraphModule(module, graph)
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
