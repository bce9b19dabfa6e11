"""One entry as one graph whose library is built, and its call as plain data: what is taken from where, and given back.

The call is traced by Dynamo and the graph is rewritten as ever. What Dynamo does around the graph is seen in one call
whose graph is replaced by a probe: it takes note of the tensors that it is given, and gives fresh ones back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from k31compile.ahead.effects import refuse_effects, state_of
from k31compile.ahead.sizes import DynamicSizes
from k31compile.ahead.sources import argument_root, name_of_source
from k31compile.ahead.variants import replaced
from k31compile.ahead.writes import written_inputs
from k31compile.cache.artefact.arguments import Described, describe
from k31compile.cache.artefact.flags import current_flags, schema_of
from k31compile.cache.artefact.results import describe_result
from k31compile.cache.artefact.signature import bind, describe_signature, signature_of
from k31compile.cache.artefact.tensors import Mismatch, describe_tensor
from k31compile.captured import captured_call
from k31compile.entry import Entry
from k31compile.errors import ArtefactError, NativeError, TraceError
from k31compile.graph.sizes import expression_of, hint
from k31compile.options import Options
from k31compile.report import Report
from k31compile.targets.native.build import build_native

_OF_TORCH = ("aten", "prims", "prim")

Tell = Callable[[str], None]
Declared = Mapping[str, tuple[int, int]]


@dataclass
class Built:
    """An entry whose library is in its folder.

    `data` is what the manifest has of it; `weights` are the tensors that the graph takes beside the arguments, by name;
    `left_out` are sizes within the bounds that the graph does not serve.
    """

    entry: Entry
    folder: Path
    data: dict[str, Any]
    weights: dict[str, torch.Tensor]
    written: set[str]
    operators: dict[str, str]
    report: Report
    graph_text: str
    tensors: list[torch.Tensor]
    left_out: list[dict[str, int]]
    seconds: dict[str, float] = field(default_factory=dict)


class _Probe:
    """Takes the place of the compiled graph for one call."""

    def __init__(self, folder: Path, tell: Tell, tensors: Sequence[torch.Tensor]) -> None:
        self.folder, self.tell, self.tensors = folder, tell, tensors
        self.looked_at: dict[int, torch.Tensor] = {}
        self.graph: fx.GraphModule | None = None
        self.plan: dict[str, Any] = {}
        self.report = Report()
        self.given: Sequence[Any] = ()
        self.outputs: list[Any] = []
        self.text = ""
        self.seconds = 0.0

    def __call__(self, graph: fx.GraphModule, inputs: tuple[Any, ...], report: Report) -> Callable[..., Any]:
        refuse_effects()
        self.looked_at = dict(_looked_at(self.tensors))
        self.outputs = [_stand_in(value) for value in graph.graph.output_node().args[0]]  # type: ignore[union-attr]
        self.text = f"{graph.graph}\n"
        self.graph, self.report = graph, report
        self.tell("build the library")
        start = time.perf_counter()
        self.plan = build_native(graph, inputs, self.folder)
        self.seconds = time.perf_counter() - start

        def answer(*given: Any) -> list[Any]:
            self.given = given
            return self.outputs

        return answer


def _looked_at(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """The tensors that Dynamo has looked at in the call under way, by number, as it sees them.

    The graph may take fewer: of some the model reads the sizes only.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    known = InstructionTranslator.current_tx().output.side_effects.id_to_variable
    for number, tensor in enumerate(tensors):
        variable: Any = known.get(id(tensor))
        if variable is not None:
            yield number, variable.as_proxy().node.meta["example_value"]


def _stand_in(value: Any) -> Any:
    """A fresh tensor in the place of an output."""
    if not isinstance(value, fx.Node):
        return value
    made = value.meta.get("val")
    if not isinstance(made, torch.Tensor):
        raise TraceError(f"output {value.name} is a {type(made).__name__}, no tensor", hint="return it as a tensor")
    shape, strides = ([hint(size) for size in sizes] for sizes in (made.shape, made.stride()))
    return torch.empty_strided(shape, strides, dtype=made.dtype)


def build_entry(entry: Entry, folder: Path, options: Options, tell: Tell, declared: Declared) -> Built:
    """Capture and build an entry into a folder; `tell` is told what begins.

    `declared` are the bounds of sizes as their author gave them, of which this entry may take a part.

    Raises:
        ArtefactError: its arguments or its result are no plain data, a call does more than compute, or its graph cannot
            be built to a library.
        TraceError: Dynamo does not make one graph of it.
    """
    start = time.perf_counter()
    try:
        built = _build(entry, folder, options, tell, declared)
    except Mismatch as mismatch:
        raise ArtefactError(str(mismatch), f"entry {entry.name!r}", hint=_REFUSED) from mismatch
    except NativeError as error:
        raise ArtefactError(f"its graph is no library: {error.what}", f"entry {entry.name!r}", hint=_REFUSED) from error
    finally:
        torch._dynamo.reset()
    codegen = built.seconds["build"]
    passes = built.report.phases.get("passes", 0.0)
    built.seconds |= {"passes": passes, "trace": time.perf_counter() - start - codegen - passes}
    return built


_REFUSED = "change the entry's arguments or the model, or use torch.compile(model, backend='k31')"


def _build(entry: Entry, folder: Path, options: Options, tell: Tell, declared: Declared) -> Built:
    args, kwargs = replaced((entry.args, dict(entry.kwargs)), {})
    signature = signature_of(entry.model)
    described = describe(bind(signature, args, kwargs))
    sizes = DynamicSizes(entry, described)
    list(_promises(described, sizes, set()))
    _refuse_own_tensors(entry.model, described)
    probe = _Probe(folder, tell, described.tensors)
    before = state_of(entry.model, described.tree)
    tell("trace")
    with entry.grad_mode(), sizes.marked():
        flags = current_flags()
        result = captured_call(entry.model, args, kwargs, options, probe)
    assert probe.graph is not None
    before.compare(entry.model, describe(bind(signature, args, kwargs)).tree)
    written = written_inputs(probe.graph)
    sources = _Sources(entry, described, probe, written)
    graph_sizes = sizes.learn(probe.graph, sources.numbers, probe.looked_at)
    data = {
        "name": entry.name,
        "folder": folder.name,
        "mode": entry.mode,
        "parameters": describe_signature(signature),
        "tree": described.tree,
        "tensors": list(_promises(described, sizes, {sources.numbers[i] for i in written if i in sources.numbers})),
        "sizes": graph_sizes.bounds,
        "declared": {name: list(bounds) for name, bounds in declared.items()},
        "conditions": graph_sizes.conditions,
        "flags": flags,
        "inputs": sources.data,
        "plan": probe.plan,
        "result": describe_result(result, probe.outputs, probe.given, described),
    }
    names = {sources.names[i] for i in written if i in sources.names}
    return Built(
        entry, folder, data, sources.weights, names, _operators(probe.graph), probe.report, probe.text,
        described.tensors, graph_sizes.left_out(entry.name), {"build": probe.seconds},
    )  # fmt: skip


def _refuse_own_tensors(model: Any, described: Described) -> None:
    """Raise Mismatch for an argument that the model holds too: the two are one to Dynamo, and apart at a later call."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    held = {id(value): name for module in modules for name, value in _tensors_of(module)}
    for path, tensor in zip(described.paths, described.tensors, strict=True):
        if id(tensor) in held:
            raise Mismatch(path, f"is the model's own {held[id(tensor)]}", "a tensor of its own; pass a clone")


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    named = {**vars(module), **module._buffers, **module._parameters}
    return ((name, value) for name, value in named.items() if isinstance(value, torch.Tensor))


def _promises(described: Described, sizes: DynamicSizes, written: set[int]) -> Iterator[dict[str, Any]]:
    for number, (path, tensor) in enumerate(zip(described.paths, described.tensors, strict=True)):
        first = described.number_of(tensor)
        same = first if first != number else None
        yield describe_tensor(path, tensor, sizes.names_of(number), same, first in written).to_data()


class _Sources:
    """Where each input of the graph comes from: a tensor of the arguments, a size of one, or a weight by its name."""

    def __init__(self, entry: Entry, described: Described, probe: _Probe, written: set[int]) -> None:
        assert probe.graph is not None
        self.data: list[dict[str, Any]] = []
        self.numbers: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.weights: dict[str, torch.Tensor] = {}
        numbers = {id(tensor): number for number, tensor in reversed(list(enumerate(described.tensors)))}
        known = _names_of_weights(entry.model)
        roots = set(described.tree)
        nodes = probe.graph.graph.find_nodes(op="placeholder")
        for place, (node, value) in enumerate(zip(nodes, probe.given, strict=True)):
            if not isinstance(value, torch.Tensor):
                self.data.append({"size": place})
            elif id(value) in numbers:
                self.numbers[place] = numbers[id(value)]
                self.data.append({"tensor": numbers[id(value)]})
            else:
                root = argument_root(node)
                if root in roots:
                    raise Mismatch(root, f"is made a tensor before the graph ({node.name})", "tensors as they are")
                name = known.get(id(value)) or name_of_source(node)
                self.names[place] = name
                self.weights[name] = value
                self.data.append({"weight": name, "written": place in written})
        self.data = [self._of_size(one, nodes) if "size" in one else one for one in self.data]

    def _of_size(self, source: dict[str, Any], nodes: Sequence[fx.Node]) -> dict[str, Any]:
        """Where a tensor of the arguments has a size that is an input; nothing where no tensor has it."""
        wanted = nodes[source["size"]].meta.get("val")
        for place, number in self.numbers.items():
            for dim, size in enumerate(nodes[place].meta["val"].shape):
                both = isinstance(size, torch.SymInt) and isinstance(wanted, torch.SymInt)
                if both and expression_of(size) == expression_of(wanted):
                    return {"size": [number, dim]}
        return {}


def _names_of_weights(model: Any) -> dict[int, str]:
    """The first name of each parameter and buffer, as the state dict has it."""
    if not isinstance(model, nn.Module):
        return {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {id(tensor): name for name, tensor in reversed(named)}


def _operators(graph: fx.GraphModule) -> dict[str, str]:
    """The operators of the graph that are not torch's own, with their schemas."""
    names: set[str] = set()
    for node in graph.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in _OF_TORCH:
            names.add(f"{target._schema.name}.{target._schema.overload_name or 'default'}")
    return {name: schema_of(name) or "" for name in sorted(names)}
