"""What an artefact promises for one tensor of a call, and the check that a tensor is what was promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Size = int | str
"""A number, or the name of a dynamic size."""


ALL_TENSORS_FIT = 5
"""The nearness of what is found when each tensor by itself was as promised."""


class Mismatch(Exception):
    """A part of a call that is not as promised: where it is, what was found, what is allowed."""

    def __init__(self, path: str, found: str, allowed: str, nearness: int = 0) -> None:
        super().__init__(f"{path} {found}, allowed is {allowed}")
        self.path, self.found, self.allowed = path, found, allowed
        # Of entries that stop at the same argument the nearest one is told: after kind and dtype come the sizes.
        self.nearness = nearness


@dataclass(frozen=True)
class TensorPromise:
    """A tensor as it was at compile.

    `strides` are those of a tensor without dynamic sizes. One with them is dense, its dimensions nested in `order`,
    outermost first. `same` is the number of an earlier tensor that it is.
    """

    path: str
    dtype: str
    device: str
    shape: tuple[Size, ...]
    strides: tuple[int, ...] | None
    order: tuple[int, ...] | None
    same: int | None
    written: bool

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TensorPromise:
        """What `to_data` wrote."""
        return cls(
            data["path"],
            data["dtype"],
            data["device"],
            tuple(data["shape"]),
            None if data["strides"] is None else tuple(data["strides"]),
            None if data["order"] is None else tuple(data["order"]),
            data["same"],
            data["written"],
        )

    def to_data(self) -> dict[str, Any]:
        """The promise as JSON has it."""
        return {
            "path": self.path,
            "dtype": self.dtype,
            "device": self.device,
            "shape": list(self.shape),
            "strides": None if self.strides is None else list(self.strides),
            "order": None if self.order is None else list(self.order),
            "same": self.same,
            "written": self.written,
        }

    def told(self) -> str:
        """The promise in words."""
        return f"a tensor {self.dtype} {list(self.shape)}".replace("'", "")

    def strides_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides that a tensor of a shape must have."""
        if self.strides is not None:
            return self.strides
        assert self.order is not None
        strides, step = [0] * len(shape), 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= shape[dim]
        return tuple(strides)


class TensorCheck:
    """The check of one promise, made once and asked at every call."""

    def __init__(self, promise: TensorPromise, bounds: Mapping[str, tuple[int, int]], told: Mapping[str, Any]) -> None:
        self.promise = promise
        self._told = told
        self._dtype = getattr(torch, promise.dtype)
        self._device = torch.device(promise.device)
        self._static = all(isinstance(size, int) for size in promise.shape)
        self._shape = promise.shape
        self._named = [(dim, size, *bounds[size]) for dim, size in enumerate(promise.shape) if isinstance(size, str)]

    def __call__(self, value: Any, sizes: dict[str, int]) -> None:
        """Raise Mismatch unless a value is as promised; dynamic sizes are added to `sizes` or compared with them."""
        promise = self.promise
        if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
            found = "is None" if value is None else f"is a {type(value).__name__}"
            raise Mismatch(promise.path, found, promise.told())
        if value.dtype is not self._dtype:
            raise Mismatch(promise.path, f"has dtype {_short(value.dtype)}", promise.dtype)
        if value.device != self._device:
            raise Mismatch(promise.path, f"is on {value.device}", str(self._device))
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            kind = _short(value.layout) if value.layout is not torch.strided else "conjugated or negated lazily"
            raise Mismatch(promise.path, f"is {kind}", "a strided tensor that is itself")
        if value.is_quantized or value.is_nested:
            raise Mismatch(promise.path, "is quantized or nested", "a plain strided tensor")
        shape = tuple(value.shape)
        if shape != self._shape:
            self._check_sizes(shape, sizes)
        self._check_strides(value, shape)

    def _check_sizes(self, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
        path, wanted = self.promise.path, self.promise.shape
        fits = len(shape) == len(wanted) and all(
            isinstance(right, str) or left == right for left, right in zip(shape, wanted, strict=True)
        )
        if not fits:
            raise Mismatch(path, f"has shape {list(shape)}", f"{list(wanted)}".replace("'", ""), 1)
        for dim, name, low, high in self._named:
            if not low <= shape[dim] <= high:
                least, most = self._told[name]
                found = f"has size {shape[dim]} in dimension {dim} ({name})"
                raise Mismatch(path, found, f"{least} to {most}", 2)
            known = sizes.setdefault(name, shape[dim])
            if known != shape[dim]:
                found = f"has size {shape[dim]} in dimension {dim} ({name})"
                raise Mismatch(path, found, f"{known}, as {name} is in another argument", 3)

    def _check_strides(self, value: torch.Tensor, shape: tuple[int, ...]) -> None:
        strides, wanted = value.stride(), self.promise.strides_of(shape)
        if strides == wanted or value.numel() == 0:
            return
        # The stride of a dimension of size 1 is never taken.
        if all(a == b or size == 1 for a, b, size in zip(strides, wanted, shape, strict=True)):
            return
        allowed = f"{list(wanted)} (.contiguous() or .clone() makes a copy)"
        raise Mismatch(self.promise.path, f"has strides {list(strides)}", allowed, 4)


def describe_tensor(
    path: str, tensor: torch.Tensor, names: Mapping[int, str], same: int | None, written: bool
) -> TensorPromise:
    """The promise for a tensor as it is; `names` are the names of its dynamic dimensions.

    Raises:
        Mismatch: a tensor of a kind that no artefact takes.
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        raise Mismatch(path, f"is a {type(tensor).__name__}", "a plain tensor")
    if tensor.layout is not torch.strided:
        raise Mismatch(path, f"has layout {_short(tensor.layout)}", "a strided tensor")
    if tensor.device.type != "cpu":
        raise Mismatch(path, f"is on {tensor.device}", "the CPU")
    shape = tuple(names.get(dim, int(size)) for dim, size in enumerate(tensor.shape))
    order = _order(tensor) if names else None
    if names and order is None:
        raise Mismatch(path, f"has dynamic sizes and strides {list(tensor.stride())}", "a dense tensor")
    strides = None if names else tuple(tensor.stride())
    return TensorPromise(path, _short(tensor.dtype), str(tensor.device), shape, strides, order, same, written)


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from the outermost to the innermost, or None where the tensor is not dense."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if tensor.stride(dim) != step and tensor.shape[dim] != 1:
            return None
        step *= tensor.shape[dim]
    return tuple(order)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first byte of a tensor to behind its last; equal where it has no element."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return begin, begin + span * tensor.element_size()


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")
