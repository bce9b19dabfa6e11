"""`guards="modules"` and `"none"`: which of Dynamo's guards a compiled model keeps, and what the model must not do.

A deep model has thousands of guards on its own modules and a few on the call's arguments: asking them all at each
decode step takes longer than the step. What is never dropped: guards on arguments (a graph that is called with other
shapes reads memory that is not its own), on dynamic sizes, on torch's global state, and on tensors of the model that
are no parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from k31compile.errors import OptionError

Filter = Callable[[Sequence[Any]], Sequence[bool]]

_OWN = {"_parameters", "_modules", "_buffers", "_non_persistent_buffers_set", "training"}


def guard_filter(guards: str) -> Filter | None:
    """What torch.compile takes as `guard_filter_fn` for a value of the option `guards`; None keeps all guards."""
    if guards == "safe":
        return None
    keeps = _is_kept_without_modules if guards == "modules" else _is_kept_without_surroundings
    return lambda entries: [keeps(entry) for entry in entries]


def both(one: Filter | None, other: Filter | None) -> Filter | None:
    """The filter that keeps what both keep."""
    if one is None or other is None:
        return one or other
    return lambda entries: [a and b for a, b in zip(one(entries), other(entries), strict=True)]


def _is_kept_without_modules(entry: Any) -> bool:
    return not entry.orig_guard.source.is_unspecialized_nn_module() or _is_state(entry)


def _is_kept_without_surroundings(entry: Any) -> bool:
    return _is_kept_without_modules(entry) and not entry.is_global


def _is_state(entry: Any) -> bool:
    """Whether a guard asks for the shape of a tensor that may be a cache or a state, held by the model itself."""
    return entry.guard_type == "TENSOR_MATCH" and not isinstance(entry.value, nn.Parameter)


class KeptState:
    """What the modules of a model hold beside parameters and submodules, as it was."""

    def __init__(self, model: nn.Module) -> None:
        """Note what `model` holds now, containers by what is in them; a tensor may become another."""
        self._model = model
        self._before = dict(_attributes(model))

    def hold(self, guards: str) -> None:
        """Raise OptionError where a call changed what the dropped guards had asked for."""
        now = dict(_attributes(self._model))
        changed = sorted(name for name in now.keys() | self._before.keys() if now.get(name) != self._before.get(name))
        if changed:
            raise OptionError(
                f"guards={guards!r} is not for this model: its forward changes {', '.join(changed[:3])}"
                + (f" and {len(changed) - 3} more" if len(changed) > 3 else ""),
                hint="leave guards='safe', or hand what changes to forward as an argument",
            )


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        held = {name: value for name, value in vars(module).items() if name not in _OWN} | module._buffers
        for name, value in held.items():
            yield f"{path}.{name}".lstrip("."), _appearance(value)


def _appearance(value: Any, depth: int = 2) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.Tensor  # its shape keeps its guard
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    if isinstance(value, list | tuple) and depth:
        return type(value), tuple(_appearance(item, depth - 1) for item in value)
    if isinstance(value, dict) and depth:
        return type(value), tuple((key, _appearance(item, depth - 1)) for key, item in value.items())
    return type(value), id(value)
