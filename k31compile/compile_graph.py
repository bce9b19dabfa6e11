"""What becomes of a graph that no cache has: trace, passes, target, report; or Inductor, with the reason."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch.amp.autocast_mode import _enter_autocast

from k31compile.between_regions import rewrite_between
from k31compile.captured import Capture, GraphCapturedError
from k31compile.contract.census import count_contained, count_fused, describe_graph
from k31compile.contract.compare import hold_to_contract
from k31compile.errors import K31Error, NativeError, OptionError, StrictError, TargetError, TraceError
from k31compile.graph.named_regions import read_regions
from k31compile.graph.trace import refuse_shared_memory, trace_functional
from k31compile.keeping import Keeping
from k31compile.leaves.hook import current
from k31compile.leaves.leaf import as_written, count_leaves, leaf_calls
from k31compile.leaves.learn import learn
from k31compile.nested import body_of, nested_calls, run_fake
from k31compile.options import Options
from k31compile.passes.pipeline import add_to_report, copy_module, run_pipeline
from k31compile.report import Report
from k31compile.targets.cpu import compile_for_cpu, compile_with_regions, providers
from k31compile.targets.pack_linears import pack_linears
from k31compile.targets.skinny_linears import use_skinny_linears
from k31compile.targets.small_products import sum_small_products
from k31compile.targets.widened_products import widen_products

Compiled = Callable[..., Any]

_SAID = "k31 explain says more of it"

_AS_WRITTEN = {"provider": "as written", "why": "named in parts for a schedule, nothing is replaced"}


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report,
    keeping: Keeping | None = None,
    capture: Capture | None = None,
) -> Compiled:
    """Compile Dynamo's graph and tell the report; with `keeping` what was built is kept.

    Raises:
        StrictError, ContractError: as the options ask.
        TargetError: a graph that the target cannot have, and nobody else either.
        GraphCapturedError: with `capture`, once that has the graph after the passes.
    """
    _tell_of_leaves(module, report)
    foreign = _why_not_ours(module, example_inputs, options)
    if foreign:
        return _hand_over(module, example_inputs, options, report, foreign, capture)
    report.nodes_before = _count_nodes(module)
    rewrite = _Rewrite(options, report, capture.target if capture is not None else options.target or "cpu")
    try:
        how = rewrite.nested if nested_calls(module) else rewrite
        rewritten = how(module, example_inputs)
    except StrictError:
        raise
    except K31Error as error:
        return _hand_over(module, example_inputs, options, report, str(error), capture)
    _describe(rewritten, example_inputs, options, report, keeping is not None)
    hold_to_contract(report, options)
    if capture is not None:
        capture.graph, capture.inputs = rewritten, tuple(example_inputs)
        if capture.then is not None:
            if options.choice == "measured":
                raise OptionError(
                    "option choice='measured' is not for a compile ahead of time, which calls nothing",
                    hint="measure with torch.compile, and give the entry fuse=[] where that says so",
                )
            return capture.then(rewritten, capture.inputs, report)
        raise GraphCapturedError
    start = time.perf_counter()
    if _is_to_measure(module, options, report):
        compiled = _compile_both(rewritten, module, example_inputs, options, report, keeping)
    else:
        compiled = _compile_for_target(rewritten, example_inputs, options, report, keeping)
    report.phases["codegen"] = time.perf_counter() - start
    return compiled


def _describe(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report, is_kept: bool
) -> None:
    report.nodes_after = _count_nodes(module)
    session = current()
    if session is not None:
        report.learned = learn(module, session)
    report.regions = _regions(module)
    report.fused, report.contains = dict(count_fused(module)), dict(count_contained(module))
    report.providers = providers(report.fused) | {region["name"]: _AS_WRITTEN for region in report.regions}
    # What is kept may be held to a contract by a later process.
    with_memory = is_kept or options.codegen == "ops" or options.lock is not None
    describe_graph(report, module, example_inputs, with_memory)


def _compile_for_target(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report, keeping: Keeping | None
) -> Compiled:
    if _is_ascend(options.target):
        # It brings the cost models and the converters' tables along.
        from k31compile.targets.ascend.device import compile_for_ascend

        return compile_for_ascend(module, example_inputs, options, report)
    _choose_products(module, options, report)
    if nested_calls(module) and options.codegen == "inductor":
        try:
            return compile_with_regions(module, example_inputs, report)
        except (NativeError, TraceError) as error:
            told = {"provider": "inductor", "why": f"the wrapper is Python: {error.what}"}
            report.providers["call_region"] = told
    if keeping is not None and options.codegen == "inductor":
        try:
            return keeping.build(module, example_inputs, options, report)
        except NativeError as error:
            report.cache["why"] = f"not kept, Inductor compiled it for this process: {error.what}"
    keep = keeping.keep if keeping is not None else None
    return compile_for_cpu(module, example_inputs, options, report, keep)


def _choose_products(module: fx.GraphModule, options: Options, report: Report) -> None:
    use_skinny_linears(module, report)
    if options.layout == "nz":
        pack_linears(module, report)
    if options.codegen == "inductor":
        sum_small_products(module)
    widen_products(module, report)


def _is_to_measure(module: fx.GraphModule, options: Options, report: Report) -> bool:
    if options.choice != "measured" or not report.fused:
        return False
    if not nested_calls(module):
        return True
    report.notes.append(
        "choice='measured' takes no graphs of nested regions: this one runs fused, nothing was measured"
    )
    return False


def _compile_both(
    rewritten: fx.GraphModule,
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report,
    keeping: Keeping | None,
) -> Compiled:
    # It is of use to few, and a second trace is only paid by those.
    from k31compile.targets.measured import Candidate, both_or_fused, written_inputs

    written = trace_functional(as_written(copy_module(module)), example_inputs)

    def build(is_fused: bool) -> Candidate:
        graph = rewritten if is_fused else written
        if is_fused:
            _choose_products(graph, options, report)
        if keeping is not None:
            with contextlib.suppress(NativeError):
                return Candidate(*keeping.build_to_keep(graph, example_inputs, report))
        return Candidate(compile_for_cpu(graph, example_inputs, options, report))

    return both_or_fused(build, written_inputs(written), report)


def _is_ascend(target: str | None) -> bool:
    return target is not None and target.startswith("ascend")


def _tell_of_leaves(module: fx.GraphModule, report: Report) -> None:
    """Put into the report which functions were kept whole, by how many calls, and which candidates were not."""
    report.leaves = count_leaves(module)
    session = current()
    if session is not None:
        report.refused.extend(session.refusals())


def _why_not_ours(module: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> str:
    """Why this graph goes to Inductor as it is; empty where it does not."""
    graphs = [child.graph for child in module.modules() if isinstance(child, fx.GraphModule)]
    if any(graph.find_nodes(op="call_function", target=_enter_autocast) for graph in graphs):
        return (
            "the graph enters autocast itself, and its casts are not seen by the passes, so Inductor compiled it "
            "unfused: call the compiled model inside of torch.autocast, or give it weights of the lower precision"
        )
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return (
            "k31 compiles for inference and this graph wants gradients, so Inductor compiled it unfused: "
            "call the model under torch.no_grad() or torch.inference_mode()"
        )
    devices = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
    if devices and options.target is None:
        return f"target {'/'.join(sorted(devices))} is not built yet, so Inductor compiled this graph unfused"
    return ""


def _hand_over(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report,
    why: str,
    capture: Capture | None,
) -> Compiled:
    if options.strict:
        raise StrictError(why)
    if capture is not None and capture.then is not None:
        raise TraceError(f"this graph is not compiled ahead of time: {why}", hint=_SAID)
    if _is_ascend(options.target):
        # Inductor has no code for an NPU: what it made would run elsewhere.
        raise TargetError(f"this graph is not compiled for {options.target}: {why}", hint=_SAID)
    report.notes.append(why)
    report.cache["why"] = "not kept: the graph went to Inductor as it was"
    as_written(module)
    kept = [leaf.to_dict()["where"] for _, leaf in leaf_calls(module)]
    report.leaves = [entry for entry in report.leaves if entry["where"] in kept]
    hold_to_contract(report, options)
    if options.codegen == "ops":
        return module.forward
    compiled: Any = compile_fx(module, list(example_inputs))
    return compiled  # type: ignore[no-any-return]


@dataclass
class _Rewrite:
    """Trace and passes over graphs of one compile, their seconds and findings added up in one report."""

    options: Options
    report: Report
    target: str

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        """The graph after the passes."""
        start = time.perf_counter()
        traced = trace_functional(module, example_inputs)
        middle = time.perf_counter()
        rewritten, stages = run_pipeline(traced, self.options, self.target)
        end = time.perf_counter()
        add_to_report(self.report, stages)
        _add(self.report, "trace", middle - start)
        _add(self.report, "passes", end - middle)
        return rewritten

    def nested(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        """Rewrite each nested body once, and each stretch of the outer graph between the calls."""
        calls = nested_calls(module)
        run = run_fake(module, example_inputs)
        refuse_shared_memory(
            (node.name, example, run.is_written(run.values[node]))
            for node, example in zip(module.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
            if isinstance(example, torch.Tensor)
        )
        for name, operands in run.operands.items():
            setattr(module, name, self(getattr(module, name), operands))
        rewrite_between(module, run, self)
        self.report.notes.append(
            f"{len(calls)} layers are calls of {len({body_of(module, call) for call in calls})} nested regions; "
            "passes saw the regions and what stands between two of them, each by itself"
        )
        return module


def _count_nodes(module: fx.GraphModule) -> int:
    return sum(len(child.graph.nodes) for child in module.modules() if isinstance(child, fx.GraphModule))


def _regions(module: fx.GraphModule, calls: int = 1) -> list[dict[str, Any]]:
    """The named regions of a graph, then those of its nested bodies with the number of their calls."""
    found = [region.to_dict() | {"calls": calls} for region in read_regions(module.graph)]
    for name, count in Counter(body_of(module, call) for call in nested_calls(module)).items():
        found += _regions(getattr(module, name), calls * count)
    return found


def _add(report: Report, phase: str, seconds: float) -> None:
    report.phases[phase] = report.phases.get(phase, 0.0) + seconds
