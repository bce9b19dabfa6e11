"""The signature of a model as plain data: a call of an artefact is bound as a call of the model is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from k31compile.cache.artefact.values import KINDS_OF_RESULTS, register_word, text_of, value_from

Parameters = list[dict[str, Any]]


class _LeftOut:
    """Stands for a default that is no plain value: the argument must be left out, as it was at compile."""

    def __repr__(self) -> str:
        return "left out"


LEFT_OUT = _LeftOut()
register_word(_LeftOut, "left out")


def signature_of(model: Callable[..., Any]) -> inspect.Signature:
    """The signature that a call of a module or function has."""
    return inspect.signature(getattr(model, "forward", model))


def describe_signature(signature: inspect.Signature) -> Parameters:
    """Name, kind and default of each parameter."""
    return [_describe(parameter) for parameter in signature.parameters.values()]


def _describe(parameter: inspect.Parameter) -> dict[str, Any]:
    data: dict[str, Any] = {"name": parameter.name, "kind": parameter.kind.name}
    if parameter.default is not inspect.Parameter.empty:
        text = text_of(parameter.default)
        data["default"] = text if text is not None and text[0] in KINDS_OF_RESULTS else ["left out", ""]
    return data


def signature_from(parameters: Sequence[Mapping[str, Any]]) -> inspect.Signature:
    """The signature that was described."""
    return inspect.Signature([_parameter(data) for data in parameters])


def _parameter(data: Mapping[str, Any]) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty
    if "default" in data:
        default = LEFT_OUT if data["default"][0] == "left out" else value_from(data["default"])
    return inspect.Parameter(data["name"], getattr(inspect.Parameter, data["kind"]), default=default)


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by parameter, defaults included.

    Raises:
        TypeError: the call does not fit.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
