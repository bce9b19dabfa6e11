"""What a call does beside computing: an artefact runs no Python of the model, so such an entry is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from k31compile.cache.artefact.arguments import told
from k31compile.cache.artefact.values import text_of
from k31compile.errors import ArtefactError

_HINT = "give it as an argument or a result, or update a tensor in place"


def refuse_effects() -> None:
    """Raise where the call that Dynamo is tracing changes an object, list or dict that was there before it.

    Raises:
        ArtefactError: it does, with the place as Dynamo names it.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    effects = InstructionTranslator.current_tx().output.side_effects
    for variable in list(effects.id_to_variable.values()):
        if isinstance(variable.mutation_type, AttributeMutationNew | ValueMutationNew):
            continue
        if effects.is_modified(variable) and not _is_as_before(variable, effects.store_attr_mutations):
            source = variable.source
            name = source.name if source is not None else "an object"
            fields = ", ".join(map(str, effects.store_attr_mutations.get(variable, ())))
            what = f"{name}{f' ({fields})' if fields else ''}"
            raise ArtefactError(f"the call changes {what}, which an artefact would not do", hint=_HINT)


_OF_TORCH_COMPILE = ("_is_torch_compile", "_compiled_call_impl")


def _is_as_before(variable: Any, changes: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Whether an object whose attributes were set ends with the values that it began with: a flag put back."""
    changed = changes.get(variable)
    if not changed:
        return False
    real = getattr(variable, "value", None)
    for name, final in changed.items():
        if not final.is_python_constant():
            return False
        text = text_of(getattr(real, name, variable))
        if text is None or text != text_of(final.as_python_constant()):
            return False
    return True


@dataclass
class State:
    """The plain values that a model and the arguments of a call hold, to be compared with those after the call."""

    modules: dict[str, Any]
    arguments: dict[str, str]

    def compare(self, model: Any, tree: Mapping[str, Any]) -> None:
        """Raise ArtefactError where the call changed one of them."""
        for name, now in dict(_modules(model)).items():
            if self.modules.get(name) != now:
                raise ArtefactError(f"the call changes {name} of the model, which an artefact would not do", hint=_HINT)
        after = dict(_flat(tree))
        for path in {**self.arguments, **after}:
            if self.arguments.get(path) != after.get(path):
                raise ArtefactError(f"the call changes {path}, which an artefact would not do", hint=_HINT)


def state_of(model: Any, tree: Mapping[str, Any]) -> State:
    """The state before a call."""
    return State(dict(_modules(model)), dict(_flat(tree)))


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(model, nn.Module):
        return
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _OF_TORCH_COMPILE:
                continue
            place = f"{path}.{name}" if path else name
            text = text_of(value)
            if text is not None:
                yield place, text
            elif isinstance(value, torch.Tensor):
                yield place, id(value)
            elif isinstance(value, list | tuple) and all(text_of(part) for part in value):
                yield place, [text_of(part) for part in value]


def _flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Every node of a tree of arguments by its path, without what is below it."""
    for name, node in tree.items():
        yield from _flat_node(node, name)


def _flat_node(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    items = node.get("items", ())
    yield path, str({key: value for key, value in node.items() if key != "items"})
    for step, item in zip(node.get("steps", ()), items, strict=True):
        yield from _flat_node(item, path + told(step))
