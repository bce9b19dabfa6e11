"""Build a graph with AOTInductor: one library, and the calls of operators that it leaves to torch as JSON."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from k31compile.errors import NativeError
from k31compile.targets.native.load import EXTERNS, LIBRARY
from k31compile.targets.native.prepare import Plan, prepare


def build_native(module: fx.GraphModule, example_inputs: Sequence[Any], folder: Path) -> Plan:
    """Build the library of a graph into a folder and return the plan of its calls; the graph stays as it was.

    Runs under the fake mode and the autocast of the compile under way. No weight is part of what is built.

    Raises:
        NativeError: AOTInductor cannot build this graph; the text says why.
    """
    try:
        copy, inputs, plan = prepare(module, example_inputs)
    except NativeError:
        raise
    except Exception as error:
        raise _cannot("it cannot be prepared for AOTInductor", error) from error
    if not any("library" in output for output in plan["outputs"]) and not _writes(copy):
        raise NativeError("the graph computes nothing")
    with tempfile.TemporaryDirectory(prefix=".native-", dir=folder) as scratch:
        built = _compile(copy, inputs, Path(scratch))
        externs = built.with_suffix(".json")
        _strip(built)
        shutil.copyfile(built, folder / LIBRARY)
        (folder / EXTERNS).write_bytes(externs.read_bytes() if externs.exists() else b'{"nodes": []}')
    return plan


def _writes(module: fx.GraphModule) -> bool:
    return any(node.op == "call_function" and not node.users for node in module.graph.nodes)


def _compile(module: fx.GraphModule, inputs: Sequence[Any], scratch: Path) -> Path:
    from torch._inductor.compile_fx import compile_fx_aot

    # A dictionary of its own, since Inductor writes into the one of the configuration.
    patches = {"aot_inductor.output_path": f"{scratch}/", "aot_inductor.package": False, "aot_inductor.metadata": {}}
    try:
        # Under autocast this is where the casts come into the graph.
        with warnings.catch_warnings(), torch.no_grad(), _constants_beside(inputs):
            warnings.simplefilter("ignore")
            made: Any = compile_fx_aot(module, list(inputs), config_patches=patches)
    except Exception as error:
        raise _cannot("AOTInductor cannot build it", error) from error
    return Path(made)


@contextlib.contextmanager
def _constants_beside(inputs: Sequence[Any]) -> Iterator[None]:
    """Let a graph's constant tensors, which are real ones, stand in an operator beside the inputs, which are not."""
    modes = {value.fake_mode for value in inputs if isinstance(value, FakeTensor)}
    before = {mode: mode.allow_non_fake_inputs for mode in modes}
    try:
        for mode in modes:
            mode.allow_non_fake_inputs = True
        yield
    finally:
        for mode, allowed in before.items():
            mode.allow_non_fake_inputs = allowed


def _cannot(what: str, error: Exception) -> NativeError:
    lines = str(error).strip().splitlines() or [""]
    return NativeError(f"{what}: {type(error).__name__}: {lines[0]}")


def _strip(library: Path) -> None:
    """Take away the names and places of what was compiled: they are half of the bytes and differ by folder."""
    tool = shutil.which("strip")
    if tool is not None:
        subprocess.run([tool, "--strip-all", str(library)], check=False, capture_output=True, timeout=60)
