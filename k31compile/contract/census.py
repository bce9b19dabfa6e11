"""Count the k31 operators of a finished graph, layer by layer, and tell which code each layer is."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from k31compile.graph.named_regions import read_regions
from k31compile.graph.peak import predict_memory
from k31compile.graph.sizes import input_values
from k31compile.graph.source import module_path, source_line
from k31compile.kernels import OPERATORS
from k31compile.nested import body_of, is_nested_call
from k31compile.options import FUSIONS
from k31compile.passes.layout.static_top_k import is_static_top_k
from k31compile.passes.pipeline import copy_module
from k31compile.report import Report
from k31compile.targets.reinplace import reinplace_cache_writes

Item = TypeVar("Item")
Reader = Callable[[fx.GraphModule], Iterable[tuple[str, Item]]]


def count_fused(module: fx.GraphModule) -> Counter[str]:
    """k31 operators and named regions by call site: a nested body counts once for each call."""
    found: Counter[str] = Counter()
    for counts in count_by_layer(module).values():
        found.update(counts)
    return _sorted(found)


def count_contained(module: fx.GraphModule) -> Counter[str]:
    """The operators whose work larger ones do, by call site."""
    return _sorted(Counter(name for _, name in _by_layer(module, _contained)))


def count_by_layer(module: fx.GraphModule) -> dict[str, Counter[str]]:
    """The same by the path of the module whose code became the operator."""
    found: dict[str, Counter[str]] = {}
    for path, name in _by_layer(module, _fusions):
        found.setdefault(path, Counter())[name] += 1
    return {path: _sorted(found[path]) for path in sorted(found, key=natural)}


def lines_by_layer(module: fx.GraphModule) -> dict[str, list[str]]:
    """Path of a module -> every `file.py:line` of its code that made a node, in the order of the graph."""
    found: dict[str, dict[str, None]] = {}
    for path, node in _by_layer(module, _nodes):
        if node.op == "call_function":
            found.setdefault(path, {})[source_line(node)] = None
    return {path: list(lines) for path, lines in found.items()}


def natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts `layers.2` before `layers.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


def describe_graph(report: Report, module: fx.GraphModule, example_inputs: Sequence[Any], with_memory: bool) -> None:
    """Write counts by layer, inputs, the layers of each refusal and, where asked for, memory into the report."""
    report.layers = {path: dict(counts) for path, counts in count_by_layer(module).items()}
    is_weight = [isinstance(example, torch.nn.Parameter) for example in example_inputs]
    values = input_values(module, example_inputs)
    report.inputs = describe_inputs(value for value, weight in zip(values, is_weight, strict=True) if not weight)
    lines = lines_by_layer(module)
    report.lines = {path: known[0] for path, known in lines.items()}
    layers: dict[str, list[str]] = {}
    for path, known in lines.items():
        for line in known:
            layers.setdefault(line, []).append(path)
    report.refused = [replace(refusal, layers=tuple(layers.get(refusal.where, ()))) for refusal in report.refused]
    if with_memory:
        as_run = copy_module(module)
        for node, weight in zip(as_run.graph.find_nodes(op="placeholder"), is_weight, strict=True):
            node.meta["is_parameter"] = weight
        reinplace_cache_writes(as_run)
        report.memory = predict_memory(as_run, lambda node: _called_body(as_run, node)).to_dict()


def describe_inputs(values: Iterable[Any]) -> list[str]:
    """Dtype and shape of every tensor among the inputs, sorted: Dynamo's order follows the code's."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sorted(f"{str(t.dtype).removeprefix('torch.')}{_shape(t)}" for t in tensors)


def _shape(tensor: torch.Tensor) -> str:
    sizes: Iterable[Any] = tensor.shape
    return "[" + ", ".join("?" if isinstance(size, torch.SymInt) else str(size) for size in sizes) + "]"


def _fusions(module: fx.GraphModule) -> Iterator[tuple[str, str]]:
    """The fusions of one graph, without its nested bodies, by the path of their module."""
    for node in module.graph.nodes:
        if str(node.target).startswith("k31."):
            yield module_path(node), str(node.target).split(".")[1]
        if is_static_top_k(node):
            yield module_path(node), "static_top_k"
    for region in read_regions(module.graph):
        yield region.module, region.name


def _contained(module: fx.GraphModule) -> Iterator[tuple[str, str]]:
    for node in module.graph.nodes:
        if str(node.target).startswith("k31."):
            parts = OPERATORS[str(node.target).split(".")[1]].parts(*node.args, **node.kwargs)
            yield from ((module_path(node), part) for part, count in Counter(parts).items() for _ in range(count))


def _nodes(module: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    for node in module.graph.nodes:
        if _called_body(module, node) is None:
            yield module_path(node), node


def _by_layer(module: fx.GraphModule, read: Reader[Item]) -> Iterator[tuple[str, Item]]:
    """What `read` finds in a graph; what it finds in a nested body comes for each call, under the caller's path."""
    yield from read(module)
    first: dict[str, str] = {}
    for node in module.graph.nodes:
        body = _called_body(module, node)
        if body is not None:
            path = module_path(node)
            traced_as = first.setdefault(body_of(module, node), path)
            for inner, item in _by_layer(body, read):
                yield _moved(inner, traced_as, path), item


def _called_body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    body = getattr(module, body_of(module, node)) if is_nested_call(node) else None
    return body if isinstance(body, fx.GraphModule) else None


def _moved(path: str, old: str, new: str) -> str:
    return new + path.removeprefix(old) if path == old or path.startswith(f"{old}.") else path


def _sorted(counts: Counter[str]) -> Counter[str]:
    return Counter({name: counts[name] for name in (*FUSIONS, *counts) if counts[name]})
