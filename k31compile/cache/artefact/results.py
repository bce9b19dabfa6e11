"""The value that a call returns, as plain data: which output of the graph, or which argument, stands where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from k31compile.cache.artefact.arguments import Described, parts_of, told
from k31compile.cache.artefact.tensors import Mismatch
from k31compile.cache.artefact.values import KINDS_OF_RESULTS, class_from, class_name, text_of, value_from

Result = dict[str, Any]
Maker = Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any]], Any]
"""Makes a result from the graph's outputs, its inputs, and the arguments by name."""


def describe_result(value: Any, outputs: Sequence[Any], inputs: Sequence[Any], arguments: Described) -> Result:
    """Write down what a call returned, with known tensors as the graph's outputs and inputs.

    Raises:
        Mismatch: something in it that is neither, nor plain data.
    """
    known: dict[int, Result] = {id(tensor): {"input": i} for i, tensor in enumerate(inputs)}
    for number, tensor in enumerate(arguments.tensors):
        known.setdefault(id(tensor), {"tensor": number})
    known.update({id(tensor): {"output": i} for i, tensor in enumerate(outputs) if isinstance(tensor, torch.Tensor)})

    def describe(value: Any, path: str) -> Result:
        if isinstance(value, torch.Tensor):
            if id(value) not in known:
                raise Mismatch(path, "is a tensor that the call makes outside of its graph", "an output of the graph")
            return known[id(value)]
        text = text_of(value)
        if text is not None:
            if text[0] not in KINDS_OF_RESULTS:
                raise Mismatch(path, f"is a {text[0]}", "a tensor, number, text or None")
            return {"value": text}
        if id(value) in arguments.objects:
            return {"argument": _steps_to(value, arguments)}
        parts = parts_of(value)
        if parts is None:
            raise Mismatch(path, f"is a {type(value).__name__}", "tensors, plain values and containers of them")
        kind, steps = parts
        class_from(class_name(type(value)))
        items = [describe(part, path + told(step)) for step, part in steps]
        return {kind: class_name(type(value)), "steps": [step for step, _ in steps], "items": items}

    return describe(value, "the result")


def _steps_to(value: Any, arguments: Described) -> list[Any]:
    """The name of a parameter and the steps from its value to an object."""

    def find(node: Mapping[str, Any], path: str, steps: list[Any]) -> list[Any] | None:
        if path == wanted:
            return steps
        for step, item in zip(node.get("steps", ()), node.get("items", ()), strict=True):
            found = find(item, path + told(step), [*steps, step])
            if found is not None:
                return found
        return None

    wanted = arguments.objects[id(value)]
    for name, node in arguments.tree.items():
        found = find(node, name, [name])
        if found is not None:
            return found
    raise Mismatch("the result", f"holds {wanted}", "an object of the arguments")


def places_of(result: Mapping[str, Any], path: str = "result") -> Iterator[tuple[str, str, int]]:
    """Each tensor of a result: where it stands, and which output, input or tensor of the arguments it is."""
    for kind in ("output", "input", "tensor"):
        if kind in result:
            yield path, kind, result[kind]
    for step, item in zip(result.get("steps", ()), result.get("items", ()), strict=True):
        yield from places_of(item, path + told(step))


def result_maker(result: Result) -> Maker:
    """What makes the value that was written down.

    Raises:
        ArtefactError: a class of it cannot be imported here.
    """
    if "output" in result:
        place = result["output"]
        return lambda outputs, inputs, arguments: outputs[place]
    if "input" in result:
        number = result["input"]
        return lambda outputs, inputs, arguments: inputs[number]
    if "tensor" in result:
        tensor = result["tensor"]
        return lambda outputs, inputs, arguments: arguments[TENSORS][tensor]
    if "value" in result:
        value = value_from(result["value"])
        return lambda outputs, inputs, arguments: value
    if "argument" in result:
        name, *steps = result["argument"]
        return lambda outputs, inputs, arguments: _walk(arguments[name], steps)
    return _container_maker(result)


TENSORS = "\0tensors"
"""The name under which the tensors of the arguments stand beside the arguments, as no parameter can be called."""


def _walk(value: Any, steps: Sequence[Any]) -> Any:
    for step in steps:
        value = dict((str(known), part) for known, part in (parts_of(value) or ("", []))[1])[str(step)]
    return value


def _container_maker(result: Result) -> Maker:
    kind = next(key for key in ("sequence", "mapping", "object") if key in result)
    build = _builder(kind, class_from(result[kind]), result["steps"])
    items = [result_maker(item) for item in result["items"]]
    return lambda outputs, inputs, arguments: build([make(outputs, inputs, arguments) for make in items])


def _builder(kind: str, cls: type, steps: Sequence[Any]) -> Callable[[list[Any]], Any]:
    if kind == "sequence":
        named = hasattr(cls, "_fields")
        return (lambda items: cls(*items)) if named else cls
    if kind == "mapping":
        keys = [value_from(step[1:]) for step in steps]
        if dataclasses.is_dataclass(cls):  # as transformers' ModelOutput
            return lambda items: cls(**dict(zip(keys, items, strict=True)))
        return lambda items: cls(zip(keys, items, strict=True))
    names = [step[1] for step in steps]

    def build(items: list[Any]) -> Any:
        made: Any = object.__new__(cls)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(made, name, item)
        return made

    return build
