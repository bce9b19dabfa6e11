"""What a slice does while it is tried: which tensors it touches, what it leaves changed, when it may raise."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from k31compile.graph.confirm import Mismatch, first_line
from k31compile.leaves.bytecode import Unfit, all_codes
from k31compile.leaves.call import run_watched

_SIZE_ALONE = frozenset(
    ["zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"]
)
_READS_A_VALUE = frozenset(["_local_scalar_dense", "equal", "allclose", "is_nonzero"])


def run_observed(
    values: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor], run: Callable[[], Any], arguments: Any
) -> Any:
    """What `run` gives, which reads `arguments` that hold these tensors; `others` may be asked for their sizes alone.

    Raises:
        Mismatch: it uses one of the others, or it raised an error that numbers outside of its domain do not explain.
        Unfit: it changed something, drew random numbers, or raises where the data tell it to.
    """
    before = list(_parts_of(arguments))
    try:
        with _Observer(others):
            result = run_watched({**others, **values}, run)
    except (Unfit, Mismatch, IndexError, RuntimeError):
        raise
    except Exception as error:
        raise Mismatch(f"it cannot be run on samples: {type(error).__name__}: {first_line(error)}") from error
    after = list(_parts_of(arguments))
    if len(before) != len(after) or any(one is not other for one, other in zip(before, after, strict=True)):
        raise Unfit("it changes a list or an attribute that it is given")
    return result


class _Observer(TorchDispatchMode):
    """Refuse uses of tensors that are no operand, and questions about data in code that may raise."""

    def __init__(self, others: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others = {tensor.untyped_storage()._cdata: name for name, tensor in others.items()}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Confirmations run while Dynamo traces, and this is none of what it traces."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS_A_VALUE:
            _refuse_raising(sys._getframe(1))
        if self.others and name not in _SIZE_ALONE and not func.is_view:
            for tensor in _tensors_in([*args, *(kwargs or {}).values()]):
                other = self.others.get(tensor.untyped_storage()._cdata)
                if other is not None:
                    raise Mismatch(f"it also uses {other}")
        return func(*args, **(kwargs or {}))


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _refuse_raising(frame: types.FrameType | None) -> None:
    """Refuse where code of the author's that asks for a value, or that called who asks, may raise because of it."""
    while frame is not None:
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if library == "k31compile" and frame.f_code.co_name == "run_watched":
            return
        if library not in ("torch", "k31compile") and _may_raise(frame.f_code):
            where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
            raise Unfit(f"an assert or a raise around {where} may depend on the data")
        frame = frame.f_back


@functools.lru_cache(maxsize=256)
def _may_raise(code: types.CodeType) -> bool:
    return any(one.opname == "RAISE_VARARGS" for inner in all_codes(code) for one in dis.get_instructions(inner))


def _parts_of(value: Any, seen: Collection[int] = ()) -> Iterator[Any]:
    """Everything that lists and modules hold, and they themselves, in order; attributes are set by no fit code."""
    yield value
    if id(value) in seen:
        return
    known = {*seen, id(value)}
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts_of(part, known)
    elif isinstance(value, nn.Module):
        for name, part in vars(value).items():
            if name in ("_parameters", "_buffers", "_modules"):
                yield from part
                for member in part.values():
                    yield from _parts_of(member, known)
            elif isinstance(part, list):
                yield from _parts_of(part, known)
