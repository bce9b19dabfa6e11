"""k31 operators as ONNX functions: one for each operator and kind of call, shared by all calls of that kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from k31compile.onnx_export.formulas import Formula, formula_of
from k31compile.onnx_export.libraries import quiet
from k31compile.onnx_export.tidy import clear_node

DOMAIN = "k31"


@dataclass(frozen=True)
class Kind:
    """What calls of one function have in common.

    Attributes:
        operator: the k31 operator, and the function's name.
        overload: "" for the first kind of an operator in a model, then "2", "3" and so on.
        inputs: the name of each tensor, its dtype and its shape, in the order in which a call passes them.
        attributes: what a call is given besides tensors, as text by name.

    """

    operator: str
    overload: str
    inputs: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    attributes: tuple[tuple[str, str], ...]

    def title(self) -> str:
        """One line that says what the function is."""
        tensors = ", ".join(f"{name} {_said(dtype)}{list(shape)}" for name, dtype, shape in self.inputs)
        options = ", ".join(f"{name}={value}" for name, value in self.attributes)
        return f"k31::{self.operator} of {tensors}" + (f"; {options}" if options else "")


_TENSOR = object()


@dataclass(frozen=True)
class _Known:
    """A kind of call, and how to make one of its tensors: `leaves` are its arguments with a mark for each tensor."""

    kind: Kind
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    formula: Formula

    def run(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(rest) if x is _TENSOR else x for x in self.leaves], self.spec)
        return self.formula(*args, **kwargs)


class Functions:
    """The functions that a model needs, found call by call."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}

    def kinds(self) -> list[Kind]:
        """All kinds of call, in the order of their first."""
        return [known.kind for known in self._known.values()]

    def of_call(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, list[Tensor]]:
        """The kind of a call, and its tensors in the order of the function's inputs.

        Raises:
            TargetError: the operator has no formula for these arguments.
        """
        found, spec = pytree.tree_flatten_with_path((args, kwargs))
        tensors = [leaf for _, leaf in found if isinstance(leaf, Tensor)]
        leaves = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for _, leaf in found)
        key = (operator, str(spec), leaves, tuple((x.dtype, tuple(x.shape)) for x in tensors))
        if key not in self._known:
            formula = formula_of(operator, args, kwargs)
            earlier = sum(known.kind.operator == operator for known in self._known.values())
            named = [(_name(operator, path), leaf) for path, leaf in found]
            inputs = tuple((name, x.dtype, tuple(x.shape)) for name, x in named if isinstance(x, Tensor))
            options = tuple((name, str(x)) for name, x in named if not isinstance(x, Tensor) and x is not None)
            kind = Kind(operator, str(earlier + 1) if earlier else "", inputs, options)
            self._known[key] = _Known(kind, spec, leaves, formula)
        return self._known[key].kind, tensors

    def build(self, opset: int) -> Iterator[Any]:
        """Translate each formula; yields an `onnx_ir.Function` for each kind."""
        for known in self._known.values():
            yield _function(known, opset)


class _Body(nn.Module):
    """A formula as what torch.onnx exports: its tensors in, its results out."""

    def __init__(self, known: _Known) -> None:
        super().__init__()
        self.known = known

    def forward(self, *tensors: Tensor) -> Any:
        return self.known.run(tensors)


def _function(known: _Known, opset: int) -> Any:
    import onnx_ir as ir

    kind = known.kind
    names = [name for name, _, _ in kind.inputs]
    count = len(_schema(kind.operator).returns)
    results = ["result"] if count == 1 else [f"result_{i}" for i in range(count)]
    examples = tuple(torch.empty(shape, dtype=dtype) for _, dtype, shape in kind.inputs)
    with quiet(), torch.no_grad():
        program = torch.onnx.export(_Body(known).eval(), examples, dynamo=True, verbose=False, opset_version=opset)
    assert program is not None
    model: Any = program.model
    ir.passes.common.InlinePass()(model)
    ir.passes.common.OutputFixPass()(model)
    graph = model.graph
    _write_constants(graph)
    _rename(graph, names, results)
    graph.doc_string = kind.title()
    function = ir.Function(DOMAIN, kind.operator, kind.overload, graph=graph, attributes=())
    function.metadata_props["k31.kind"] = kind.title()
    for node in function.all_nodes():
        clear_node(node)
    return function


def _write_constants(graph: Any) -> None:
    """A function has no initializers: each becomes a Constant node at its beginning."""
    import onnx_ir as ir

    values = list(graph.initializers.values())
    nodes = []
    for value in values:
        node = ir.node("Constant", inputs=[], attributes={"value": value.const_value}, num_outputs=1)
        node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = value.name, value.shape, value.type
        value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        nodes.append(node)
    graph.initializers.clear()
    first = next(iter(graph), None)
    if first is None:
        graph.extend(nodes)
    else:
        graph.insert_before(first, nodes)


def _rename(graph: Any, inputs: Sequence[str], results: Sequence[str]) -> None:
    """Call inputs and results by these names, and whatever had one of them by a longer one."""
    ends = [*graph.inputs, *graph.outputs]
    inside = [value for node in graph.all_nodes() for value in node.outputs if all(value is not end for end in ends)]
    used = {value.name for value in inside} | {*inputs, *results}
    for value in inside:
        if value.name in (*inputs, *results):
            value.name = next(name for i in range(2, len(used) + 3) if (name := f"{value.name}_{i}") not in used)
            used.add(value.name)
    for value, name in zip(ends, (*inputs, *results), strict=True):
        value.name = name


def _name(operator: str, path: Sequence[Any]) -> str:
    """The name that the operator's schema has for an argument, with its position where it is one of a list."""
    part, place, *inside = path
    first = str(getattr(place, "key", ""))
    if getattr(part, "idx", 1) == 0:
        first = _schema(operator).arguments[place.idx].name
    return "_".join([first, *(str(key.idx) for key in inside)])


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _schema(operator: str) -> Any:
    """The operator's schema; `getattr`, since a packet asked for by `__getattr__` would be made anew."""
    return getattr(torch.ops.k31, operator).default._schema
