"""One way of calling a function: which parameters hold tensors and which constants, and the call on other tensors."""

from __future__ import annotations

import inspect
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from k31compile.graph.evaluate import float64_by_default, raised
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.globals import is_constant

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Slot:
    """The place of a tensor among the arguments, by the name of its parameter."""

    name: str


@dataclass(frozen=True)
class Call:
    """A function with constants for some parameters and places for tensors in the others.

    `tensors` are those of the call that was seen, most likely fake ones: only their sizes and types are read.
    """

    function: types.FunctionType
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: Tensors

    @staticmethod
    def of(function: types.FunctionType, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call with these arguments; parameters left out keep their defaults.

        Raises:
            Unfit: an argument is neither a tensor nor a constant, or the arguments do not fit the function.
        """
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise Unfit(f"it cannot be called so: {error}") from None
        tensors: dict[str, torch.Tensor] = {}

        def slot(name: str, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                tensors[name] = value
                return Slot(name)
            if not is_constant(value):
                raise Unfit(f"its argument {name} is a {type(value).__name__}, neither a tensor nor a constant")
            return value

        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL and bound.arguments.get(name):
                raise Unfit(f"it takes any number of arguments by *{name}")
        names = list(inspect.signature(function).parameters)
        positional = tuple(slot(name, value) for name, value in zip(names, bound.args, strict=False))
        keywords = {name: slot(name, value) for name, value in bound.kwargs.items()}
        return Call(function, positional, keywords, tensors)

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that were given, by parameter."""
        names = list(inspect.signature(self.function).parameters)
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        return {name: value for name, value in given.items() if not isinstance(value, Slot)}

    def key(self) -> str:
        """Equal for calls that differ in sizes alone."""
        tensors = [f"{n}: {t.dtype} of {t.dim()}" for n, t in sorted(self.tensors.items())]
        constants = [f"{name}={value!r}" for name, value in sorted(self.constants.items())]
        return "; ".join([*tensors, *constants])

    def run(self, values: Tensors) -> Any:
        """The function's result on these tensors."""

        def filled(value: Any) -> Any:
            return values[value.name] if isinstance(value, Slot) else value

        return self.function(*map(filled, self.args), **{name: filled(value) for name, value in self.kwargs.items()})


def run_watched(values: Tensors, run: Callable[[], Any]) -> Any:
    """What `run` gives, which calls a function on `values`.

    Raises:
        Unfit: the function wrote into an argument, or drew random numbers.
    """
    versions = {name: tensor._version for name, tensor in values.items()}
    drawn, drawn_by_python = torch.get_rng_state(), random.getstate()
    result = run()
    for name, tensor in values.items():
        if tensor._version != versions[name]:
            raise Unfit(f"it writes into its argument {name}")
    if random.getstate() != drawn_by_python or not torch.equal(torch.get_rng_state(), drawn):
        raise Unfit("it draws random numbers")
    return result


def run_in_float64(call: Call, values: Tensors) -> Any:
    """The function's result on float64 tensors, with every cast and factory in it at float64: its algebra."""
    with raised_to_float64():
        return run_watched(values, lambda: call.run(values))


@contextmanager
def raised_to_float64() -> Iterator[None]:
    """Every cast, factory and dtype argument inside the block is float64 where it would be another float."""
    with float64_by_default(), _Raised():
        yield


class _Raised(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Confirmations run while Dynamo traces, and this is none of what it traces."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*raised(args), **raised(dict(kwargs or {})))


@contextmanager
def alone() -> Iterator[None]:
    """Call functions as if nothing were being compiled around: no gradients, no autocast, no inference tensors.

    One thread: the tensors are small, and threads that wait for each other cost more than they save.
    """
    threads = torch.get_num_threads()
    with (
        torch.inference_mode(mode=False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        _disable_current_modes(),
    ):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
