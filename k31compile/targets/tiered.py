"""codegen="tiered": a graph that runs operator by operator at once, and as Inductor built it once a child has."""

import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import codecache, config, cpp_builder
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.standalone_compile import CompiledArtifact
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from k31compile.errors import DocumentError, StrictError
from k31compile.graph.document import write_graph
from k31compile.graph.sizes import input_values
from k31compile.report import Report
from k31compile.targets.builder import BUILDER, Job
from k31compile.targets.native.load import load_native

log = logging.getLogger("k31compile")

Call = Callable[..., Any]

Keep = Callable[[Path, Mapping[str, Any], str, Report], None]
"""Takes a folder with a library, its plan, the conditions on dynamic sizes, and the report of its graph."""


def compile_tiered(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    run: Callable[[], Call],
    report: Report,
    strict: bool,
    keep: Keep | None = None,
) -> "Tiered":
    """Hand a graph to the child that builds, and return what runs it meanwhile; `run` may change the graph for that."""
    inputs = input_values(module, example_inputs)
    try:
        if torch._C._is_any_autocast_enabled():
            raise DocumentError("autocast casts what its operators are given, and the child builds without it")
        job: Job | DocumentError = BUILDER.submit({**write_graph(module, inputs), "state": _state()})
    except DocumentError as error:
        job = error
    sizes = [i for i, value in enumerate(inputs) if isinstance(value, torch.SymInt)]
    return Tiered(run(), job, sizes, report, strict, keep)


class Tiered:
    """A compiled graph that is looked after between its calls, on the calling thread.

    Every call is run by one of the two versions as a whole. The built one serves the sizes that it was built for; where
    it is dynamic, calls whose sizes do not meet its conditions go on operator by operator.
    """

    def __init__(
        self,
        run: Call,
        job: Job | DocumentError,
        sizes: Sequence[int],
        report: Report,
        strict: bool,
        keep: Keep | None = None,
    ) -> None:
        """`run` is the graph operator by operator; `sizes` says which of its inputs are dynamic sizes."""
        self._run = run
        self._job = job
        self._sizes = sizes
        self._report = report
        self._strict = strict
        self._keep = keep
        self._swap = threading.Lock()
        self._built: Call | None = None
        self._fits: Callable[[Sequence[Any]], bool] = lambda _: True
        self._failure = ""
        self._calls = 0
        report.tier = "ops"
        if isinstance(job, DocumentError):
            self._fail(f"{job.what}")

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph once."""
        if self._built is None and not self._failure:
            self._calls += 1
            self._look()
        if self._built is not None and self._fits(inputs):
            return self._built(*inputs)
        if self._strict and self._failure:
            raise StrictError(self._failure)
        return self._run(*inputs)

    def _look(self) -> None:
        assert isinstance(self._job, Job)
        BUILDER.look()
        answer = self._job.answer
        if answer is None or not self._swap.acquire(blocking=False):
            return
        try:
            # While another thread compiles, Inductor is left alone; there will be another call.
            if self._built is None and not self._failure and compile_lock.acquire(blocking=False):
                try:
                    self._take(self._job, answer)
                finally:
                    compile_lock.release()
        finally:
            self._swap.release()

    def _take(self, job: Job, answer: Mapping[str, Any]) -> None:
        if "error" in answer:
            job.path.unlink(missing_ok=True)
            self._fail(answer["error"])
            return
        begin = time.perf_counter()
        try:
            built = self._taken_over(job, answer)
        except Exception as error:
            self._fail(f"what was built cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}")
            return
        self._fits = _condition(answer["guards"], self._sizes)
        self._built = built
        self._report.tier = "inductor"
        self._report.phases["child"] = answer["seconds"]
        self._report.phases["swap"] = time.perf_counter() - begin
        self._report.notes.append(
            f"tiered: call {self._calls} and those after it run what Inductor built in a child process, in "
            f"{answer['seconds']:.1f} s ({answer['cpu']:.1f} CPU s)"
        )

    def _taken_over(self, job: Job, answer: Mapping[str, Any]) -> Call:
        """What the child built, loaded; a library is kept, Inductor's own artefact is in Inductor's cache."""
        if "plan" not in answer:
            return load_built(job)
        built = load_native(job.built, answer["plan"])
        if self._keep is not None:
            self._keep(job.built, answer["plan"], answer["guards"], self._report)
        shutil.rmtree(job.built, ignore_errors=True)
        job.path.unlink(missing_ok=True)
        return built

    def _fail(self, why: str) -> None:
        self._failure = f"tiered: this graph stays operator by operator: {why}"
        self._report.tier = "failed"
        self._report.notes.append(self._failure)
        log.warning(self._failure)


def load_built(job: Job) -> Call:
    """What the child built, from Inductor's cache; nothing is compiled here. The caller holds Dynamo's compile lock.

    Raises:
        Exception: whatever is missing or does not fit.
    """
    pick_vec_isa()  # asks the cache once per process; where it must ask the compiler, it does so before the ban
    # inference_mode would make inference tensors of the graph's constants, for all later calls.
    with torch.inference_mode(False), torch.no_grad(), _without_compiler():
        artifact = CompiledArtifact.load(path=str(job.built))
    job.path.unlink(missing_ok=True)
    job.built.unlink(missing_ok=True)

    def call(*inputs: Any) -> Any:
        # It was built where there is no autocast, for a graph that was captured without it.
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return artifact(*inputs)
        return artifact(*inputs)

    return call


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Let Inductor find libraries and never build one: a missing one is an error, not a wait of minutes.

    The header that is precompiled in front of a build is not needed for what is there; its hash alone runs g++.
    """

    def refuse(builder: Any) -> None:
        raise FileNotFoundError(f"{builder.get_target_file_path()} is not in Inductor's cache any more")

    with (
        patch.object(codecache, "_precompile_header", lambda *_, **__: ""),
        patch.object(cpp_builder.CppBuilder, "build", refuse),
    ):
        yield


def _condition(guards: str, places: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
    """Whether the sizes at these places of a call's inputs meet what was assumed when the graph was built."""
    if not guards:
        return lambda _: True
    known: dict[tuple[int, ...], bool] = {}
    shape_env = ShapeEnv()

    def fits(inputs: Sequence[Any]) -> bool:
        sizes = tuple(inputs[place] for place in places)
        if sizes not in known:
            known[sizes] = bool(shape_env.evaluate_guards_expression(guards, sizes))
        return known[sizes]

    return fits


def _state() -> dict[str, Any]:
    """What the generated code depends on beside the graph.

    Raises:
        DocumentError: Inductor was configured with something that has no plain form.
    """
    settings: Any = config
    changed = settings._get_dict(ignored_prefixes=["_"], skip_default=True)
    try:
        json.dumps(changed)
    except TypeError as error:
        raise DocumentError(f"Inductor's configuration cannot be written down: {error}") from error
    return {
        "cache": cache_dir(),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "inductor": changed,
    }
