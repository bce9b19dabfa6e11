"""Load what `build.py` built. Nothing of Dynamo or Inductor is imported here, and nothing is compiled."""

from __future__ import annotations

import functools
import operator
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from k31compile.errors import NativeError, StoreError
from k31compile.store import cache_dir

Call = Callable[..., list[Any]]

LIBRARY = "library.so"
EXTERNS = "library.json"
"""The runner looks for the calls that are left to torch beside the library, under its name."""


def load_native(folder: Path, plan: Mapping[str, Any]) -> Call:
    """What calls the library in a folder with the graph's inputs, in their order, and gives the graph's outputs.

    The library becomes code of this process: whoever calls this has checked it. One call runs at a time.

    Raises:
        NativeError: it does not load here.
    """
    run, lock = _open(folder).run, threading.Lock()
    tensors: Sequence[int] = plan["tensors"]
    take = _taker(tensors)
    finish = _finisher(plan["outputs"])
    autocast = torch._C._is_any_autocast_enabled

    def call(*inputs: Any) -> list[Any]:
        # The casts of autocast are in the library; the operators that it calls must not cast again.
        if autocast():
            with torch._C._DisableAutocast(), lock:
                made = run(take(inputs))
        else:
            with lock:
                made = run(take(inputs))
        return made if finish is None else finish(inputs, made)

    return call


def calls_by_plan(run: Callable[[Any], list[Any]], plan: Mapping[str, Any]) -> Call:
    """What gives a graph's outputs where `run` makes a library's or a program's of its inputs, as a plan says."""
    take, finish = _taker(plan["tensors"]), _finisher(plan["outputs"])
    if finish is None:
        return lambda *inputs: run(take(inputs))
    return lambda *inputs: finish(inputs, run(take(inputs)))


def _open(folder: Path) -> Any:
    """The runner of a copy that nobody else knows: what is written into the file later must not reach this process."""
    from torch._C._aoti import AOTIModelContainerRunnerCpu

    import k31compile.kernels
    import k31compile.targets.packed_linear  # noqa: F401  (both register operators that a library may call)

    why = ""
    # A temporary folder may forbid code; the cache has been loaded from before.
    for place in (tempfile.gettempdir, cache_dir):
        try:
            with tempfile.TemporaryDirectory(prefix="k31-run-", dir=place()) as own:
                for name in (LIBRARY, EXTERNS):
                    shutil.copyfile(folder / name, Path(own) / name)
                return AOTIModelContainerRunnerCpu(str(Path(own) / LIBRARY), 1)
        except (RuntimeError, OSError, StoreError) as error:
            why = why or str(error).strip().splitlines()[0]
    raise NativeError(f"the library does not load: {why}")


def _taker(places: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    if list(places) == list(range(len(places))):
        return lambda inputs: inputs[: len(places)]
    if not places:
        return lambda _: ()
    get = operator.itemgetter(*places)
    return get if len(places) > 1 else lambda inputs: (get(inputs),)


def _finisher(outputs: Sequence[Mapping[str, Any]]) -> Callable[[Sequence[Any], list[Any]], list[Any]] | None:
    """What puts the graph's outputs together; None where they are the library's as they come."""
    if [output.get("library") for output in outputs] == list(range(len(outputs))):
        return None
    makers = [_maker(output) for output in outputs]
    return lambda inputs, made: [make(inputs, made) for make in makers]


def _maker(output: Mapping[str, Any]) -> Callable[[Sequence[Any], list[Any]], Any]:
    if "library" in output:
        place = output["library"]
        return lambda _, made: made[place]
    if "value" in output:
        value = output["value"]
        return lambda _, __: value
    return functools.partial(_view_of_input, output["input"], [_step(*step) for step in output["steps"]])


def _view_of_input(place: int, steps: Sequence[Callable[..., Any]], inputs: Sequence[Any], made: list[Any]) -> Any:
    value = inputs[place]
    for step in steps:
        value = step(value, inputs)
    return value


def _step(name: str, arguments: Sequence[Any]) -> Callable[[Any, Sequence[Any]], Any]:
    function: Callable[..., Any] = operator.getitem if name == "getitem" else attrgetter(name)(torch.ops)

    def step(value: Any, inputs: Sequence[Any]) -> Any:
        return function(value, *(_argument(argument, inputs) for argument in arguments))

    return step


def _argument(argument: Any, inputs: Sequence[Any]) -> Any:
    if isinstance(argument, Mapping):
        return inputs[argument["size"]]
    if isinstance(argument, list):
        return [_argument(item, inputs) for item in argument]
    return argument
