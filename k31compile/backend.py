"""`torch.compile(model, backend="k31")`: trace, passes, target, report. Found by entry point, no import needed."""

import functools
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import UncapturedHigherOrderOpError

import k31compile.kernels  # noqa: F401  (registers the operators)
from k31compile.captured import captured_call as captured_call
from k31compile.captured import captured_graph as captured_graph
from k31compile.captured import capturing
from k31compile.contract.compare import hold_to_contract
from k31compile.errors import OptionError, TraceError
from k31compile.guard_filters import KeptState, both, guard_filter
from k31compile.keeping import begin_keeping
from k31compile.leaves.hook import count_frames, install
from k31compile.leaves.leaf import as_written, count_leaves
from k31compile.nested import marked, repeated_layers, why_not_regions
from k31compile.notes import take_notes, tell
from k31compile.options import Options
from k31compile.report import Report, record

log = logging.getLogger("k31compile")

Compiled = Callable[..., Any]

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
        listed += count_leaves(module)
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

    With `guards="modules"` or `"none"` the caller promises that the model, and with `"none"` the functions and
    constants that it uses, stay as they are at the first call of each shape (docs/performance.md, Guards).

    Raises:
        OptionError, NotBuiltYetError: at once; OptionError also after a first call that changed the model's own
            attributes where their guards are dropped: its result would be right, the next one's not.
        TraceError: at a call, where Dynamo finds that out after a graph break: a part of the model has run by then.
    """
    guards = Options.from_mapping(options).guards
    kept = both(guard_filter(guards), options.get("guard_filter_fn"))
    passed = {name: value for name, value in options.items() if name not in ("guards", "guard_filter_fn")}
    kinds = repeated_layers(model)
    forwards: dict[type[nn.Module], Any] = {}
    compiled = torch.compile(model, backend="k31", options=passed | ({"guard_filter_fn": kept} if kept else {}))
    has_run = False
    state = None if guards == "safe" else KeptState(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal state
        result = run(*args, **kwargs)
        if state is not None:
            state.hold(guards)
            state = None
        return result

    def run(*args: Any, **kwargs: Any) -> Any:
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

    return run if state is None else call


def _options(mode: str | None, options: Mapping[str, Any] | None, unknown: Mapping[str, Any]) -> Options:
    if mode not in (None, "default"):
        raise OptionError(f"backend k31 has no mode {mode!r}", hint="use options={...}; see k31compile.Options")
    if unknown:
        raise OptionError(
            f"backend k31 does not take {', '.join(sorted(unknown))}", hint="use options={...}; see k31compile.Options"
        )
    chosen = Options.from_mapping(options)
    if chosen.guards != "safe":
        raise OptionError(
            f"option guards={chosen.guards!r} is not for torch.compile, which fixes guards before a backend is asked",
            hint=f"use k31compile.compile(model, guards={chosen.guards!r})",
        )
    return chosen


def _compile(module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report) -> Compiled:
    capture = capturing.get()
    keeping = None if capture is not None else begin_keeping(module, example_inputs, options, report)
    if keeping is not None and (hit := keeping.find(report)) is not None:
        hold_to_contract(report, options)
        return hit
    # Everything behind this line is for graphs that are compiled now, and takes a second to import.
    from k31compile.compile_graph import compile_graph

    return compile_graph(module, example_inputs, options, report, keeping, capture)


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
