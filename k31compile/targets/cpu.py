"""Target cpu: k31 operators stay operators, Inductor compiles all around them; or the graph runs at once as it is."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.compile_fx import compile_fx

from k31compile.kernels.programs import OpenProgram
from k31compile.kernels.registry import OPERATORS, provider_for
from k31compile.options import Options
from k31compile.report import Report
from k31compile.targets.frozen_sums import mix_where_sums_lie
from k31compile.targets.native.load import calls_by_plan
from k31compile.targets.reinplace import reinplace_cache_writes
from k31compile.targets.state_writes import update_states_in_place
from k31compile.targets.tiered import Keep, compile_tiered


def compile_for_cpu(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report | None = None,
    keep: Keep | None = None,
) -> Callable[..., Any]:
    """A callable of the graph's inputs.

    `codegen="inductor"` builds C++ around our operators; `"ops"` runs operator by operator with cache writes in place;
    `"tiered"` does the second until a child process has done the first, and tells the report; `keep` is given what the
    child built.
    """
    mix_where_sums_lie(module)
    update_states_in_place(module)

    def run_operators() -> Callable[..., Any]:
        reinplace_cache_writes(module)
        return module.forward

    if options.codegen == "ops":
        return run_operators()
    if options.codegen == "tiered":
        return compile_tiered(module, example_inputs, run_operators, report or Report(), options.strict, keep)
    # Dynamo's guards have looked at the arguments, and what operators give is held to their fakes by tests: torch 2.13
    # asks again on every call, at a microsecond for each tensor.
    patches = {"size_asserts": False, "alignment_asserts": False}
    patches |= {} if options.cache else {"force_disable_caches": True}
    compiled: Any = compile_fx(module, list(example_inputs), config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def compile_with_regions(module: fx.GraphModule, example_inputs: Sequence[Any], report: Report) -> Callable[..., Any]:
    """A callable of the inputs of a graph of nested regions: each body a library, called without Python.

    Raises:
        NativeError, TraceError: there is no such way to call these regions; the graph is as it was.
    """
    from k31compile.targets.native.regions import build_program

    with tempfile.TemporaryDirectory(prefix="k31-build-") as scratch:
        program, plan = build_program(module, example_inputs, Path(scratch))
        run = OpenProgram(program)
    why = f"{len(program.libraries)} libraries, called {len(program.steps)} times"
    report.providers["call_region"] = {"provider": "native", "why": why}
    return calls_by_plan(run, plan)


def providers(fused: Iterable[str]) -> dict[str, dict[str, str]]:
    """Which implementation serves each fused operator on this machine, and why."""
    choices = {name: provider_for(name) for name in fused if name in OPERATORS}
    return {name: {"provider": choice.provider, "why": choice.why} for name, choice in choices.items()}
