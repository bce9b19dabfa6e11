"""`torch.compile(model, backend="k31")`: trace, passes, target, report. Found by entry point, no import needed."""

import functools
import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch._inductor.compile_fx import compile_fx
from torch.amp.autocast_mode import _enter_autocast
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import k31compile.kernels  # noqa: F401  (registers the operators)
from k31compile.between_regions import rewrite_between
from k31compile.contract.census import count_contained, count_fused, describe_graph
from k31compile.contract.compare import hold_to_contract
from k31compile.errors import K31Error, OptionError, StrictError, TargetError, TraceError
from k31compile.graph.named_regions import read_regions
from k31compile.graph.trace import refuse_shared_memory, trace_functional
from k31compile.leaves.hook import count_frames, current, install
from k31compile.leaves.leaf import as_written, leaf_calls
from k31compile.leaves.learn import learn
from k31compile.nested import body_of, marked, nested_calls, repeated_layers, run_fake, why_not_regions
from k31compile.notes import take_notes, tell
from k31compile.options import Options
from k31compile.passes.pipeline import add_to_report, run_pipeline
from k31compile.report import Report, record, reports
from k31compile.targets.cpu import compile_for_cpu, providers

log = logging.getLogger("k31compile")

Compiled = Callable[..., Any]

_SAID = "k31 explain says more of it"

_AS_WRITTEN = {"provider": "as written", "why": "named in parts for a schedule, nothing is replaced"}


@dataclass
class _Capture:
    """A target whose passes run, and the graph that came out of them."""

    target: str
    graph: fx.GraphModule | None = None
    inputs: tuple[Any, ...] = ()


class _GraphCaptured(Exception):
    """Ends a compile whose graph somebody asked for with `captured_graph`."""


# An error of the model's own call comes as the second, a branch on a size that depends on values as the last.
_NOT_ONE_GRAPH = (
    torch._dynamo.exc.Unsupported,
    torch._dynamo.exc.TorchRuntimeError,
    torch._dynamo.exc.UserError,
    GuardOnDataDependentSymNode,
)
_capturing: ContextVar[_Capture | None] = ContextVar("capturing", default=None)
_listing: ContextVar[list[dict[str, Any]] | None] = ContextVar("listing", default=None)


def kept_whole(model: Callable[..., Any], call: Callable[[Callable[..., Any]], Any]) -> list[dict[str, Any]]:
    """Which functions and loops a compile of a call keeps whole, as a report has them; no graph is rewritten.

    `call` is given the compiled model and calls it once.
    """
    torch._dynamo.reset()
    found: list[dict[str, Any]] = []
    token = _listing.set(found)
    try:
        call(torch.compile(model, backend="k31", options={"codegen": "ops"}, dynamic=False))
    finally:
        _listing.reset(token)
        torch._dynamo.reset()
    return found


def captured_graph(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], target: str
) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """The one graph of a call after the passes of a target, and the tensors that it takes; nothing of it is run.

    Raises:
        TraceError: Dynamo does not make one graph of the call, with its reason.
    """
    torch._dynamo.reset()
    capture, before = _Capture(target), len(reports())
    token = _capturing.set(capture)
    try:
        torch.compile(model, backend="k31", fullgraph=True, dynamic=False)(*args, **kwargs)
    except _NOT_ONE_GRAPH as error:
        why = str(error).strip().splitlines()[0]
        raise TraceError(f"the model is not one graph: {why}", hint="torch._dynamo.explain names the place") from error
    except Exception:
        if capture.graph is None:
            raise
    finally:
        _capturing.reset(token)
    if capture.graph is None:
        notes = [note for report in reports()[before:] for note in report.notes] or ["it compiled nothing"]
        raise TraceError(f"there is no graph of this call: {notes[-1]}", hint=_SAID)
    return capture.graph, capture.inputs


def k31(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Compiled:
    """The backend that torch.compile calls with Dynamo's graph; see `k31compile.Options` for the options.

    Raises:
        OptionError: an unknown option, mode or value.
        NotBuiltYetError: an option of the interface that this version does not have.
        StrictError: under `strict=True`, where the report would only tell.
    """
    chosen = _options(mode, options, unknown)
    if (listed := _listing.get()) is not None:
        listed += _leaves(module)
        return as_written(module).forward
    said = take_notes()
    report = Report(versions={"torch": torch.__version__, "python": platform.python_version()}, notes=list(said))
    try:
        compiled = _compile(module, example_inputs, chosen, report)
    finally:
        record(report)
    if not report.fused:
        log.warning(report.headline())
    for note in report.notes:
        if note not in said:
            log.warning(note)
    return compiled


def compile(model: nn.Module, **options: Any) -> Compiled:
    """Compile a model whose repeated layers are traced and built once; options as for `backend="k31"`.

    The layers' classes are marked while a call runs and as they were before and after it. Layers that Dynamo cannot
    take as regions, because they give back what they were given, are compiled one by one; the report says so.

    Raises:
        OptionError, NotBuiltYetError: at once.
        TraceError: at a call, where Dynamo finds that out after a graph break: a part of the model has run by then.
    """
    Options.from_mapping(options)
    kinds = repeated_layers(model)
    forwards: dict[type[nn.Module], Any] = {}
    compiled = torch.compile(model, backend="k31", options=options)
    has_run = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        before = count_frames()
        try:
            with marked(kinds, forwards):
                result = compiled(*args, **kwargs)
            has_run = True
            return result
        except UncapturedHigherOrderOpError as error:
            why = why_not_regions(kinds, error)
            kinds.clear()
            # Only where Dynamo was at its first frame nothing of the model has run, and it may run from the start.
            if has_run or count_frames() > before + 1:
                hint = "what ran before the layers has run; from the next call on each layer is compiled by itself"
                raise TraceError(why, hint=hint) from error
            tell(why)
        return compiled(*args, **kwargs)

    return call


def _options(mode: str | None, options: Mapping[str, Any] | None, unknown: Mapping[str, Any]) -> Options:
    if mode not in (None, "default"):
        raise OptionError(f"backend k31 has no mode {mode!r}", hint="use options={...}; see k31compile.Options")
    if unknown:
        raise OptionError(
            f"backend k31 does not take {', '.join(sorted(unknown))}", hint="use options={...}; see k31compile.Options"
        )
    return Options.from_mapping(options)


def _compile(module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report) -> Compiled:
    _tell_of_leaves(module, report)
    foreign = _why_not_ours(module, example_inputs, options)
    if foreign:
        return _hand_over(module, example_inputs, options, report, foreign)
    report.nodes_before = _count_nodes(module)
    try:
        if nested_calls(module):
            rewritten = _rewrite_nested(module, example_inputs, options, report)
        else:
            rewritten = _rewrite(module, example_inputs, options, report)
    except StrictError:
        raise
    except K31Error as error:
        return _hand_over(module, example_inputs, options, report, str(error))
    report.nodes_after = _count_nodes(rewritten)
    session = current()
    if session is not None:
        report.learned = learn(rewritten, session)
    report.regions = _regions(rewritten)
    report.fused, report.contains = dict(count_fused(rewritten)), dict(count_contained(rewritten))
    report.providers = providers(report.fused) | {region["name"]: _AS_WRITTEN for region in report.regions}
    describe_graph(report, rewritten, example_inputs, with_memory=options.codegen == "ops" or options.lock is not None)
    hold_to_contract(report, options)
    if (capture := _capturing.get()) is not None:
        capture.graph, capture.inputs = rewritten, tuple(example_inputs)
        raise _GraphCaptured
    start = time.perf_counter()
    compiled = _compile_for_target(rewritten, example_inputs, options, report)
    report.phases["codegen"] = time.perf_counter() - start
    report.cache["why"] = "kept by Inductor's own caches" if options.cache else "cache=False"
    return compiled


def _is_ascend(target: str | None) -> bool:
    return target is not None and target.startswith("ascend")


def _compile_for_target(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report
) -> Compiled:
    if not _is_ascend(options.target):
        return compile_for_cpu(module, example_inputs, options, report)
    # It brings the cost models and the converters' tables along.
    from k31compile.targets.ascend.device import compile_for_ascend

    return compile_for_ascend(module, example_inputs, options, report)


def _tell_of_leaves(module: fx.GraphModule, report: Report) -> None:
    """Put into the report which functions were kept whole, by how many calls, and which candidates were not."""
    report.leaves = _leaves(module)
    session = current()
    if session is not None:
        report.refused.extend(session.refusals())


def _leaves(module: fx.GraphModule) -> list[dict[str, Any]]:
    counts: Counter[str] = Counter()
    found: dict[str, dict[str, Any]] = {}
    for _, leaf in leaf_calls(module):
        key = leaf.identity()
        counts[key] += 1
        found.setdefault(key, leaf.to_dict())
    return [{**entry, "calls": counts[key]} for key, entry in found.items()]


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
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report, why: str
) -> Compiled:
    if options.strict:
        raise StrictError(why)
    if _is_ascend(options.target):
        # Inductor has no code for an NPU: what it made would run elsewhere.
        raise TargetError(f"this graph is not compiled for {options.target}: {why}", hint=_SAID)
    report.notes.append(why)
    as_written(module)
    kept = [leaf.to_dict()["where"] for _, leaf in leaf_calls(module)]
    report.leaves = [entry for entry in report.leaves if entry["where"] in kept]
    hold_to_contract(report, options)
    if options.codegen == "ops":
        return module.forward
    compiled: Any = compile_fx(module, list(example_inputs))
    return compiled  # type: ignore[no-any-return]


def _rewrite(module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report) -> fx.GraphModule:
    start, capture = time.perf_counter(), _capturing.get()
    target = capture.target if capture is not None else options.target or "cpu"
    traced = trace_functional(module, example_inputs)
    middle = time.perf_counter()
    rewritten, stages = run_pipeline(traced, options, target)
    end = time.perf_counter()
    add_to_report(report, stages)
    _add(report, "trace", middle - start)
    _add(report, "passes", end - middle)
    return rewritten


def _rewrite_nested(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report
) -> fx.GraphModule:
    """Rewrite each nested body once, and each stretch of the outer graph between the calls."""
    calls = nested_calls(module)
    run = run_fake(module, example_inputs)
    refuse_shared_memory(
        (node.name, example, run.is_written(run.values[node]))
        for node, example in zip(module.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        if isinstance(example, torch.Tensor)
    )
    for name, operands in run.operands.items():
        setattr(module, name, _rewrite(getattr(module, name), operands, options, report))
    rewrite_between(module, run, lambda stretch, operands: _rewrite(stretch, operands, options, report))
    report.notes.append(
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


def _options_of(compiler: Any) -> Mapping[str, Any] | None:
    """The options that Dynamo's compiler of a frame hands to `k31`; None for the compiler of another backend."""
    options: Mapping[str, Any] = {}
    while True:
        if compiler is k31:
            return options
        if isinstance(compiler, functools.partial):
            options = compiler.keywords.get("options") or options
            compiler = compiler.func
        elif hasattr(compiler, "_torchdynamo_orig_backend"):
            compiler = compiler._torchdynamo_orig_backend
        elif hasattr(compiler, "compiler_fn"):
            options = getattr(compiler, "kwargs", {}).get("options") or options
            compiler = compiler.compiler_fn
        else:
            return None


install(_options_of)
