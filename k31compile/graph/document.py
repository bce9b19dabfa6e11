"""A graph as a document of plain JSON values, and back: how another process gets a graph without a pickle.

Weights are no part of it: Dynamo gives them as inputs. Constants of the graph go along as safetensors.
"""

import base64
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import safetensors.torch
import sympy
import torch
from torch import fx
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import _get_qualified_name

from k31compile.errors import DocumentError
from k31compile.graph.sizes import expression_of, hint

Document = dict[str, Any]

_TENSORS = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def write_graph(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Document:
    """The document of a graph and of what its inputs look like.

    Raises:
        DocumentError: the graph holds something that has no plain form.
    """
    constants: dict[str, torch.Tensor] = {}
    graph = _written_module(module, "", constants)
    saved = base64.b64encode(safetensors.torch.save(constants)).decode() if constants else ""
    hints = {str(expression_of(v)): hint(v) for v in example_inputs if isinstance(v, torch.SymInt)}
    inputs = [_written_input(value, hints) for value in example_inputs]
    return {"graph": graph, "inputs": inputs, "constants": saved}


def read_graph(document: Document) -> tuple[fx.GraphModule, list[Any], FakeTensorMode]:
    """The graph of a document, its inputs as fake tensors and symbols, and the fake mode that these belong to."""
    saved = document["constants"]
    constants = safetensors.torch.load(base64.b64decode(saved)) if saved else {}
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    symbols: dict[str, Any] = {}
    for i, each in enumerate(document["inputs"]):
        if "symbol" in each:
            source = LocalSource(f"input_{i}")
            symbol = shape_env.create_symbol(each["hint"], source, dynamic_dim=DimDynamic.DYNAMIC)
            symbols[each["symbol"]] = shape_env.create_symintnode(symbol, hint=each["hint"], source=source)
    inputs = [_read_input(each, symbols, mode) for each in document["inputs"]]
    return _read_module(document["graph"], "", constants), inputs, mode


def _written_module(module: fx.GraphModule, path: str, constants: dict[str, torch.Tensor]) -> Document:
    children: Document = {}
    nodes = []
    for node in module.graph.nodes:
        target = node.target
        if node.op == "get_attr":
            held = attrgetter(target)(module)
            if isinstance(held, fx.GraphModule):
                children[target] = _written_module(held, f"{path}{target}.", constants)
            elif isinstance(held, torch.Tensor) and type(held) in (torch.Tensor, torch.nn.Parameter):
                constants[path + target] = held.detach().contiguous().clone()
            else:
                raise DocumentError(f"{target} is a {type(held).__name__}, neither a tensor nor a graph")
        elif node.op == "call_function":
            target = _name_of(target)
        elif node.op == "call_module":
            raise DocumentError(f"{target} is a call of a module")
        nodes.append([node.op, node.name, target, _written(node.args), _written(dict(node.kwargs))])
    return {"nodes": nodes, "children": children}


def _read_module(document: Document, path: str, constants: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    root = torch.nn.Module()
    for name, child in document["children"].items():
        root.add_module(name, _read_module(child, f"{path}{name}.", constants))
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs in document["nodes"]:
        if op == "get_attr" and target not in document["children"]:
            if "." in target:
                raise DocumentError(f"{target} lies in a module of its own")
            root.register_buffer(target, constants[path + target])
        real = _named(target) if op == "call_function" else target
        known[name] = graph.create_node(op, real, _read(args, known), _read(kwargs, known), name=name)
    return fx.GraphModule(root, graph)


def _name_of(function: Any) -> str:
    try:
        name = _get_qualified_name(function)
        same = _named(name) is function or _named(name) == function
    except Exception as error:
        raise DocumentError(f"{function} cannot be found by a name: {type(error).__name__}: {error}") from error
    if not same:
        raise DocumentError(f"{function} is not what {name} names")
    return name


def _named(name: str) -> Any:
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"]:
        return attrgetter(".".join(parts[1:]))(torch)
    for length in range(len(parts) - 1, 0, -1):
        try:
            holder = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return attrgetter(".".join(parts[length:]))(holder)
    raise ImportError(name)


def _written(value: Any) -> Any:
    """An argument: plain values as they are, every other one as an object with one key that says its kind."""
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case complex():
            return {"complex": [value.real, value.imag]}
        case fx.Node():
            return {"node": value.name}
        case tuple():
            return {"tuple": [_written(item) for item in value]}
        case list():
            return [_written(item) for item in value]
        case dict():
            return {"dict": [[_written(key), _written(item)] for key, item in value.items()]}
        case slice():
            return {"slice": [_written(part) for part in (value.start, value.stop, value.step)]}
        case torch.device():
            return {"device": str(value)}
    for kind, cls in _KINDS.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    if value is ...:
        return {"ellipsis": None}
    raise DocumentError(f"an argument is a {type(value).__name__}: {value!r}")


def _read(value: Any, known: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_read(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "node":
            return known[inner]
        case "tuple":
            return tuple(_read(item, known) for item in inner)
        case "dict":
            return {_read(key, known): _read(item, known) for key, item in inner}
        case "slice":
            return slice(*(_read(part, known) for part in inner))
        case "float":
            return float(inner)
        case "complex":
            return complex(*inner)
        case "device":
            return torch.device(inner)
        case "ellipsis":
            return ...
    return getattr(torch, inner)


def _written_input(value: Any, hints: Mapping[str, int]) -> Document:
    match value:
        case torch.SymInt():
            expression = expression_of(value)
            if not value.node.has_hint():
                raise DocumentError(f"the size {expression} depends on data")
            is_symbol = isinstance(expression, sympy.Symbol)
            return {"symbol" if is_symbol else "size": str(expression), "hint": hint(value)}
        case torch.Tensor() if value.layout is torch.strided and type(value) in _TENSORS:
            sizes = ([_written_size(size, hints) for size in all_sizes] for all_sizes in (value.shape, value.stride()))
            shape, stride = sizes
            return {"dtype": _written(value.dtype), "shape": shape, "stride": stride, "device": str(value.device)}
        case None | bool() | int() | float() | str():
            return {"value": _written(value)}
    raise DocumentError(f"an input is a {type(value).__name__}")


def _written_size(size: Any, hints: Mapping[str, int]) -> int | str:
    if not isinstance(size, torch.SymInt):
        return int(size)
    text = str(expression_of(size))
    if _evaluated(text, hints) != hint(size):
        raise DocumentError(f"the size {text} is not made of the sizes that are inputs")
    return text


def _evaluated(text: str, values: Mapping[str, int]) -> int | None:
    expression = _parsed(text, values).subs({_symbol(name): value for name, value in values.items()})
    return int(expression) if expression.is_Integer else None


def _parsed(text: str, names: Iterable[str]) -> sympy.Expr:
    expression: sympy.Expr = sympy.sympify(text, locals={name: _symbol(name) for name in names})
    return expression


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def _read_input(document: Document, symbols: Mapping[str, Any], mode: FakeTensorMode) -> Any:
    if "symbol" in document:
        return symbols[document["symbol"]]
    if "size" in document:
        return _read_size(document["size"], symbols)
    if "value" in document:
        return _read(document["value"], {})
    shape, stride = ([_read_size(size, symbols) for size in document[key]] for key in ("shape", "stride"))
    with mode:
        return torch.empty_strided(shape, stride, dtype=_read(document["dtype"], {}), device=document["device"])


def _read_size(size: int | str, symbols: Mapping[str, Any]) -> Any:
    """A size from its expression over the symbols that are inputs, in the symbols of this process."""
    if isinstance(size, int):
        return size
    expression = _parsed(size, symbols).subs({_symbol(name): value.node.expr for name, value in symbols.items()})
    if expression.is_Integer:
        return int(expression)
    shape_env = next(iter(symbols.values())).node.shape_env
    value = _evaluated(size, {name: hint(symbol) for name, symbol in symbols.items()})
    return shape_env.create_symintnode(expression, hint=value)
