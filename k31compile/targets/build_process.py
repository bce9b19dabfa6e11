"""The child process of codegen="tiered": builds graphs with Inductor, one after the other, into Inductor's own cache.

It reads lines of JSON from its standard input, {"job", "path"}, and answers each with one line. A path is that of a
file with the graph as a document (graph/document.py) and the state that code depends on; what was built lies beside it.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from k31compile.targets.unfinished import remove_unfinished_builds

IDLE_SECONDS = 60.0
"""How long the process waits for another graph before it ends by itself: it holds some 300 MB."""

_NICENESS = 10
_LOOK_EVERY = 0.5
_COMPILERS_END = 0.2


def main(spool: str, parent: int) -> None:
    """Serve jobs until the input ends or nothing comes for a while; ends at once where the parent is gone."""
    # Not ignored: whoever is started here, a compiler above all, ends by the signal that this process survives.
    signal.signal(signal.SIGTERM, lambda *_: None)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what compilers print must not look like an answer
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    threading.Thread(target=_watch, args=(spool, parent), daemon=True).start()
    for line in _lines(sys.stdin.fileno()):
        job = json.loads(line)
        answer = _answer(Path(job["path"]))
        print(json.dumps({"job": job["job"], **answer}), file=answers)


def _lines(descriptor: int) -> Any:
    """Lines as they come, until the end of the input or `IDLE_SECONDS` without one."""
    import select

    waiting = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], IDLE_SECONDS)
        read = os.read(descriptor, 1 << 16) if ready else b""
        if not read:
            return
        *whole, waiting = (waiting + read).split(b"\n")
        yield from whole


def _watch(spool: str, parent: int) -> None:
    """End this process and the compilers that it runs when its parent is gone, however that ended."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    shutil.rmtree(spool, ignore_errors=True)
    os.killpg(0, signal.SIGTERM)
    if cache := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        time.sleep(_COMPILERS_END)
        remove_unfinished_builds(Path(cache))
    os.killpg(0, signal.SIGKILL)


def _answer(path: Path) -> dict[str, Any]:
    begin, cpu = time.monotonic(), _cpu_seconds()
    try:
        with path.open(encoding="utf-8") as file:
            made = build(file, path.with_suffix(".built"))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {_one_line(error)}"}
    return {**made, "seconds": time.monotonic() - begin, "cpu": _cpu_seconds() - cpu}


def build(file: TextIO, destination: Path) -> dict[str, Any]:
    """Build the graph of a document: to one library, or to an artefact of Inductor's where that cannot be.

    Returns `guards`, what must hold of its dynamic sizes (empty if nothing), and `plan` of a library.
    """
    import torch
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.standalone_compile import standalone_compile
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    import k31compile.kernels
    import k31compile.targets.packed_linear  # noqa: F401  (both register operators)
    from k31compile.errors import NativeError
    from k31compile.graph.document import read_graph
    from k31compile.targets.native.build import build_native

    document = json.load(file)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = document["state"]["cache"]
    remove_unfinished_builds(Path(document["state"]["cache"]))
    torch.set_num_threads(document["state"]["threads"])
    torch.set_float32_matmul_precision(document["state"]["matmul"])
    torch.use_deterministic_algorithms(document["state"]["deterministic"])
    module, inputs, mode = read_graph(document)
    with torch.no_grad(), tracing(TracingContext(mode)), config.patch(document["state"]["inductor"]):
        made: dict[str, Any] = {}
        try:
            FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
            destination.mkdir()
            made["plan"] = build_native(module, inputs, destination)
        except NativeError:
            shutil.rmtree(destination, ignore_errors=True)
            artifact = standalone_compile(module, inputs, dynamic_shapes="from_tracing_context", options={})
            artifact.save(path=str(destination))
    sizes = [value for value, given in zip(inputs, document["inputs"], strict=True) if "hint" in given]
    assert mode.shape_env is not None
    guards = mode.shape_env.produce_guards_expression(sizes, ignore_static=False) if sizes else ""
    return {**made, "guards": guards or ""}


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} ..."
