"""One way of calling a model, written down: what commands and checks compile, run and measure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from k31compile.errors import EntryError

Bounds = tuple[str, int, int]
"""The name of a dynamic dimension, its smallest and its largest size."""

MODES = ("no_grad", "inference_mode", "grad")


@dataclass(frozen=True)
class Entry:
    """A model with arguments that it can be called with.

    Attributes:
        name: how reports and commands call it.
        model: a module or function.
        args: positional arguments of one call.
        kwargs: keyword arguments of one call.
        dynamic: path of a tensor argument -> {dimension: (name, min, max)}. A path is the position of an
            argument or its keyword, followed by keys, positions or attributes inside it: "0", "ids",
            "cache.keys.0". One name stands for one size wherever it appears.
        mode: "no_grad", "inference_mode" or "grad"; each is a compile of its own.

    """

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic: Mapping[str, Mapping[int, Bounds]] = field(default_factory=dict)
    mode: str = "no_grad"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise EntryError(f"an entry needs a name, not {self.name!r}")
        if not callable(self.model):
            raise self._wrong(f"the model is a {type(self.model).__name__}, which cannot be called")
        if not isinstance(self.args, tuple | list):
            raise self._wrong(f"args is a {type(self.args).__name__}, not a tuple", hint="write args=(x,)")
        for part in ("kwargs", "dynamic"):
            if not isinstance(getattr(self, part), Mapping):
                raise self._wrong(f"{part} is a {type(getattr(self, part)).__name__}, not a dict")
        if self.mode not in MODES:
            raise self._wrong(f"there is no mode {self.mode!r}", hint=f"modes: {', '.join(MODES)}")
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "kwargs", dict(self.kwargs))
        self._check_dynamic()

    def at(self, path: str) -> Any:
        """Return the argument, or the part of one, that a path of ``dynamic`` names."""
        first, *rest = path.split(".")
        found = self._step({**dict(enumerate(self.args)), **self.kwargs}, first, path)
        for key in rest:
            found = self._step(found, key, path)
        return found

    @contextlib.contextmanager
    def grad_mode(self) -> Iterator[None]:
        """Run a block in the mode of this entry."""
        import torch

        modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}
        with modes[self.mode]():
            yield

    def call(self) -> Any:
        """Call the model once as written, in the entry's mode."""
        with self.grad_mode():
            return self.model(*self.args, **self.kwargs)

    def _check_dynamic(self) -> None:
        bounds_of: dict[str, Bounds] = {}
        size_of: dict[str, int] = {}
        for path, dims in self.dynamic.items():
            shape = getattr(self.at(path), "shape", None)
            if shape is None:
                raise self._wrong(f"dynamic names {path!r}, which is not a tensor")
            for dim, bounds in dims.items():
                where = f"dimension {dim} of {path!r}"
                if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
                    raise self._wrong(f"there is no {where}: it has {len(shape)} dimensions")
                name, low, high = self._bounds(where, bounds)
                size = int(shape[dim])
                if not low <= size <= high:
                    raise self._wrong(f"{where} is {size}, outside of {low}..{high}")
                if bounds_of.setdefault(name, (name, low, high)) != (name, low, high):
                    raise self._wrong(f"{name!r} has two different bounds", hint="use one name per size")
                if size_of.setdefault(name, size) != size:
                    raise self._wrong(f"{name!r} is {size_of[name]} in one place and {size} in {where}")

    def _bounds(self, where: str, bounds: Any) -> Bounds:
        match bounds:
            case (str(name), int(low), int(high)) if name and 0 <= low <= high:
                return name, low, high
        raise self._wrong(f"{where} has bounds {bounds!r}", hint="write (name, min, max) with 0 <= min <= max")

    def _step(self, holder: Any, key: str, path: str) -> Any:
        index: Any = int(key) if key.isdecimal() else key
        try:
            is_indexed = isinstance(holder, Mapping) or (isinstance(holder, list | tuple) and key.isdecimal())
            return holder[index] if is_indexed else getattr(holder, key)  # a named tuple has names, too
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._wrong(f"dynamic names {path!r}, and there is no {key!r} in the arguments") from None

    def _wrong(self, what: str, hint: str | None = None) -> EntryError:
        return EntryError(what, where=f"entry {self.name!r}", hint=hint)
