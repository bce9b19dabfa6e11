"""An entry becomes an ONNX model: captured, translated by torch.onnx, named, put together with its functions."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from k31compile.backend import captured_graph
from k31compile.errors import K31Error, TargetError, UsageError
from k31compile.graph.source import source_line
from k31compile.onnx_export.functions import DOMAIN, Kind
from k31compile.onnx_export.libraries import quiet, require_onnx
from k31compile.onnx_export.names import Named, name_inputs
from k31compile.onnx_export.program import Program
from k31compile.onnx_export.tidy import tidy_nodes

if TYPE_CHECKING:
    from k31compile.entry import Entry

OPSET = 20
STATIC = "every size is that of the call that was captured"

_NO_FUNCTION = re.compile(r"No ONNX function found for <OpOverload\(op='(?P<operator>[\w.]+)'")


@dataclass(frozen=True)
class OnnxGraph:
    """The model of one entry, an `onnx_ir.Model`, and what stands in it.

    Attributes:
        name: the entry's.
        model: the `onnx_ir.Model`.
        kinds: the functions, one for each operator and kind of call.
        written: input that the model writes in place -> output that holds its new value.

    """

    name: str
    model: Any
    kinds: tuple[Kind, ...]
    written: dict[str, str]

    def counts(self) -> dict[str, int]:
        """How many calls of each k31 function the graph has."""
        return dict(sorted(Counter(n.op_type for n in self.model.graph if n.domain == DOMAIN).items()))

    def weight_bytes(self) -> int:
        """Bytes of all weights and constants."""
        return sum(value.const_value.nbytes for value in self.model.graph.initializers.values())

    def to_dict(self) -> dict[str, Any]:
        """What the model holds, as JSON has it."""
        graph = self.model.graph
        return {
            "entry": self.name,
            "opset": OPSET,
            "sizes": STATIC,
            "operators": self.counts(),
            "functions": [kind.title() for kind in self.kinds],
            "nodes": len(list(graph)),
            "inputs": [_described(value) for value in graph.inputs],
            "outputs": [_described(value) for value in graph.outputs],
            "written": self.written,
            "weights": len(graph.initializers),
            "weight_bytes": self.weight_bytes(),
        }


def export_entry(entry: Entry) -> OnnxGraph:
    """Capture one call of an entry and translate it; the call's tensors are left as they are.

    Raises:
        MissingDependencyError: onnx, onnxscript or onnxruntime is not installed.
        UsageError: the model has no values, being on the meta device.
        TraceError: the call is not one graph.
        TargetError: an operator has no translation, with its line.
    """
    require_onnx()
    if isinstance(entry.model, nn.Module):
        # Before it is traced, which takes minutes for a model of many layers.
        _refuse_meta(entry, entry.model.parameters())
    with entry.grad_mode():
        module, inputs = captured_graph(entry.model, entry.args, entry.kwargs, "cpu")
    _refuse(entry, inputs)
    program = Program(module).eval()
    taken = (*inputs, *program.constants.values())
    model = _translate(program, tuple(value.detach() for value in taken))
    model.graph.name = entry.name
    written = _name_values(entry, program, taken, model)
    tidy_nodes(model.graph, program.trace.calls)
    for function in program.trace.functions.build(OPSET):
        model.functions[function.identifier()] = function
    model.producer_name, model.producer_version, model.doc_string = "k31compile", None, None
    model.metadata_props.clear()
    model.metadata_props.update(
        {"k31.entry": entry.name, "k31.sizes": STATIC, "k31.written_inputs": json.dumps(written)}
    )
    return OnnxGraph(entry.name, model, tuple(program.trace.functions.kinds()), written)


def _refuse(entry: Entry, inputs: Sequence[Any]) -> None:
    for value in inputs:
        if not isinstance(value, Tensor):
            raise TargetError(f"{entry.name} takes {value!r}, and an ONNX graph takes tensors", hint="pass a tensor")
    _refuse_meta(entry, inputs)


def _refuse_meta(entry: Entry, tensors: Iterable[Tensor]) -> None:
    for value in tensors:
        if value.is_meta:
            raise UsageError(
                f"{entry.name} stands on the meta device, so there are no weights to write",
                hint="export an entry that computes: tiny, mini, pico, or a factory of your own",
            )


def _translate(program: Program, inputs: tuple[Tensor, ...]) -> Any:
    """The program as an `onnx_ir.Model`, its weights still inputs and its k31 calls without functions."""
    try:
        with quiet(), torch.no_grad():
            exported = torch.export.export(program, inputs, strict=False)
            made = torch.onnx.export(exported, dynamo=True, verbose=False, opset_version=OPSET)
    except K31Error:
        raise
    except Exception as error:
        raise _told(error, program) from error
    assert made is not None
    return made.model


def _told(error: BaseException, program: Program) -> TargetError:
    """One line about the operator that the exporter stumbled over, with the model's line where it is known."""
    cause: BaseException | None = error
    said = ""
    while cause is not None:
        said = str(cause).strip().splitlines()[0] if str(cause).strip() else said
        if isinstance(cause, K31Error):
            return TargetError(cause.what, where=cause.where, hint=cause.hint)
        match = _NO_FUNCTION.search(str(cause))
        if match:
            operator = match["operator"]
            return TargetError(
                f"{operator} has no translation to ONNX", where=_where(operator, program.graph),
                hint="write it with other operators",
            )  # fmt: skip
        cause = cause.__cause__
    return TargetError(f"torch.onnx cannot export the graph: {said}", hint="--debug shows what it says")


def _where(operator: str, graph: fx.Graph) -> str:
    """The model's line of an operator, or of the one that it was taken apart from, whose name ends as its own."""
    name = operator.partition(".")[2]
    nodes = [node for node in graph.nodes if str(node.target).rpartition(".")[0].endswith(name)]
    exact = [node for node in nodes if str(node.target).rpartition(".")[0] == operator]
    return next((source_line(node) for node in (*exact, *nodes)), "")


def _name_values(entry: Entry, program: Program, inputs: Sequence[Tensor], model: Any) -> dict[str, str]:
    """Name inputs and outputs, make weights initializers; returns which output updates which input."""
    import onnx_ir as ir

    ir.passes.common.OutputFixPass()(model)
    made = model.graph
    taken = {value.name for node in made for value in node.outputs} | set(made.initializers)
    named = name_inputs(entry, program.graph, inputs[: len(inputs) - len(program.constants)], taken)
    named += [Named(f"constant.{name}", is_weight=True) for name in program.constants]
    trace = program.trace
    results = list(made.outputs)
    first = len(results) - len(trace.written)
    for position, value in enumerate(results[:first]):
        value.name = "output" if first == 1 else f"output_{position}"
    written = {named[position].name: f"{named[position].name}_out" for position in trace.written}
    for value, name in zip(results[first:], written.values(), strict=True):
        value.name = name
    for position, (value, known, tensor) in enumerate(zip(list(made.inputs), named, inputs, strict=True)):
        value.name = known.name
        if known.is_weight and position not in trace.written:
            _make_weight(made, value, known, tensor)
    return written


def _make_weight(graph: Any, value: Any, named: Named, tensor: Tensor) -> None:
    import onnx_ir as ir

    graph.inputs.remove(value)
    value.const_value = ir.tensor_adapters.TorchTensor(tensor.detach().contiguous(), name=named.name)
    graph.register_initializer(value)


def _described(value: Any) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype.name.lower(), "shape": list(value.shape)}
