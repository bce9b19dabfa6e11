"""Weights on an Ascend device: cast to blocks once after loading, outside of every graph, and again after new values.

The parameter stays the object that it was; what it holds is `npu_format_cast` of it, which looks like the plain tensor
from Python. Nothing here was run on a device: there is none, and the tests give a stand-in for torch_npu's function.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from k31compile.errors import MissingDependencyError

FRACTAL_NZ = 29
"""ACL's number of the format."""

Cast = Callable[[Tensor, int], Tensor]


class _State(NamedTuple):
    """What changes when a parameter gets other memory or other values."""

    pointer: int
    version: int


_CAST = WeakIdKeyDictionary()
"""parameter -> its state after it was cast; an entry goes with its parameter."""


def cast_weights(parameters: Mapping[str, Tensor], cast: Cast | None = None) -> list[str]:
    """Cast parameters to blocks in place, each that has not been since its values changed; the names that were cast.

    Two names of one parameter, and two parameters that share their memory, are cast once and go on sharing it.

    Raises:
        MissingDependencyError: torch_npu is not installed, and no `cast` was given.
    """
    waiting = {name: parameter for name, parameter in parameters.items() if not is_cast(parameter)}
    if not waiting:
        return []
    function = cast or _npu_format_cast()
    made: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] = {}
    done: list[str] = []
    for name, parameter in waiting.items():
        if is_cast(parameter):
            continue
        place = (parameter.data_ptr(), tuple(parameter.shape), parameter.stride())
        if place not in made:
            made[place] = function(parameter.data, FRACTAL_NZ)
            done.append(name)
        parameter.data = made[place]
        _CAST[parameter] = _state(parameter)
    return done


def is_cast(parameter: Tensor) -> bool:
    """Whether a parameter was cast and has had the same memory and no new values since."""
    return bool(_CAST.get(parameter) == _state(parameter))


def _state(parameter: Tensor) -> _State:
    return _State(parameter.data_ptr(), parameter._version)


def _npu_format_cast() -> Cast:
    try:
        import torch_npu
    except ImportError as error:
        raise MissingDependencyError(
            "casting weights to blocks needs torch_npu", hint="load them onto the CPU, or install k31compile[ascend]"
        ) from error
    function: Cast = torch_npu.npu_format_cast
    return function
