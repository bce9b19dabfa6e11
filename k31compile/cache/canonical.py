"""A graph as Dynamo gives it, as text that is equal for equal work: no name, line or path of the model is in it.

Unlike graph/document.py it is never read back, so it may hold what has no plain form as a digest.
"""

from __future__ import annotations

import hashlib
import math
import types
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import fx

from k31compile.errors import KeyingError
from k31compile.graph.library_names import name_in_library
from k31compile.graph.sizes import expression_of, hint, input_values, number_inputs, symbols_of

Digest = Callable[[types.FunctionType], str]
"""A digest of a Python function and of all that it reads; raises KeyingError where that cannot be known."""

_LIBRARIES = ("torch", "math", "operator", "_operator", "builtins", "einops", "k31compile", "functools", "itertools")
_CORE = {"aten", "prims", "prim", "k31", "higher_order", "inductor", "quantized", "mkldnn", "streams"}
_PLAIN_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def write_graph_text(module: fx.GraphModule, digest_of: Digest) -> str:
    """The nodes of a graph and of those inside it, inputs by position and values by number.

    Raises:
        KeyingError: something in it may change without the text changing.
    """
    return "\n".join(_lines(module, digest_of, ""))


def write_input_text(module: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """What the inputs look like: kind, dtype, sizes and strides, device, numbers, and which of them share memory."""
    values = input_values(module, example_inputs)
    names = symbol_names(values)
    lines = [_input_line(value, example, names) for value, example in zip(values, example_inputs, strict=True)]
    lines += [f"{name} in {_range_of(symbol, values)}" for symbol, name in names.items()]
    lines += [f"number {_number(value)}" for value in number_inputs(module)]
    return "\n".join([*lines, *_sharing(example_inputs)])


def _number(value: torch.SymFloat) -> str:
    """What a number is at this call: unlike a size it becomes part of what is compiled."""
    if value.node.hint is None:
        raise KeyingError("the graph reads a number out of a tensor while it runs")
    return repr(float(value.node.hint))


def write_hint_text(module: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """The numbers that dynamic sizes had at the call that is compiled; empty where no size is dynamic.

    Raises:
        KeyingError: a size is not to be known while a graph is compiled, as torch's `mark_unbacked` asks.
    """
    sizes = [value for value in input_values(module, example_inputs) if isinstance(value, torch.SymInt)]
    if any(not size.node.has_hint() for size in sizes):
        raise KeyingError("a size is marked as unbacked, and has no number that conditions could be asked with")
    return " ".join(str(hint(size)) for size in sizes)


def symbol_names(values: Sequence[Any]) -> dict[sympy.Symbol, str]:
    """A name for each symbol that does not depend on where in the model its size came from."""
    sizes: list[Any] = []
    for value in values:
        if isinstance(value, torch.SymInt):
            sizes.append(value)
        elif isinstance(value, torch.Tensor):
            sizes += [*value.shape, *value.stride()]
    return {symbol: f"d{i}" for i, symbol in enumerate(symbols_of(sizes))}


def _lines(module: fx.GraphModule, digest_of: Digest, indent: str) -> list[str]:
    numbers: dict[fx.Node, int] = {}
    lines: list[str] = []
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        inner: list[str] = []
        match node.op:
            case "placeholder":
                target = "input"
            case "get_attr":
                held = attrgetter(str(node.target))(module)
                target, inner = _held(held, digest_of, indent)
            case "call_function":
                target = _function(node.target, digest_of)
            case "call_method" | "output":
                target = f"{node.op} {node.target if node.op == 'call_method' else ''}"
            case _:
                raise KeyingError(f"{node.name} is a call of a module")
        args = () if node.op in ("placeholder", "get_attr") else (node.args, dict(node.kwargs))
        lines.append(f"{indent}{numbers[node]} {target} {_value(args, numbers, digest_of)}")
        lines += inner
    return lines


def _held(held: Any, digest_of: Digest, indent: str) -> tuple[str, list[str]]:
    if isinstance(held, fx.GraphModule):
        return "graph", _lines(held, digest_of, f"{indent}  ")
    if isinstance(held, torch.Tensor):
        return f"constant {digest_tensor(held)}", []
    raise KeyingError(f"the graph holds a {type(held).__name__}")


def digest_tensor(tensor: torch.Tensor) -> str:
    """A digest of a tensor's dtype, sizes and bytes."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        raise KeyingError(f"the graph holds a {type(tensor).__name__} on {tensor.device}")
    plain = tensor.detach().contiguous()
    held = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
    if plain.numel():
        held.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return held.hexdigest()


def _function(target: Any, digest_of: Digest) -> str:
    given = getattr(target, "k31_digest", None)
    if given is not None:
        return f"kept {given}"
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"operator {target}{_operator_digest(target, digest_of)}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        if "triton" in target.name():
            raise KeyingError("the graph launches a Triton kernel of the model's own")
        return f"operator {target.name()}"
    if known := name_in_library(target, _LIBRARIES):
        return f"function {known}"
    if isinstance(target, types.FunctionType):
        return f"function {digest_of(target)}"
    raise KeyingError(f"the graph calls a {type(target).__name__}")


def _operator_digest(target: Any, digest_of: Digest) -> str:
    """What stands behind an operator that somebody else defined, as far as it is Python."""
    packet = target if isinstance(target, torch._ops.OpOverloadPacket) else target.overloadpacket
    name = packet._qualified_op_name
    namespace = name.partition("::")[0]
    if namespace in _CORE:
        return ""
    from torch._library.custom_ops import OPDEFS

    defined = OPDEFS.get(name)
    if defined is None:
        for overload in packet.overloads():
            whole = f"{name}.{overload}" if overload != "default" else name
            if torch._C._dispatch_has_kernel_for_dispatch_key(whole, "CompositeImplicitAutograd"):
                raise KeyingError(f"the body of the operator {name} becomes part of the graph and cannot be seen")
        return f" {[str(getattr(packet, overload)._schema) for overload in packet.overloads()]}"
    functions = [
        defined._init_fn,
        *(fn for _, fn in sorted(defined._backend_fns.items(), key=lambda item: str(item[0]))),
    ]
    if defined._abstract_fn is not None:
        functions.append(defined._abstract_fn)
    return f" {defined._schema} {[digest_of(_unwrapped(function)) for function in functions]}"


def _unwrapped(function: Any) -> Any:
    """The author's function behind torch's own wrappers of it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if function.__module__ == "torch._library.custom_ops" and code is not None and "fn" in code.co_freevars:
        inner: Any = function.__closure__[code.co_freevars.index("fn")].cell_contents
        return _unwrapped(inner)
    return function


def _value(value: Any, numbers: Mapping[fx.Node, int], digest_of: Digest) -> str:
    def inner(item: Any) -> str:
        return _value(item, numbers, digest_of)

    match value:
        case fx.Node():
            return f"%{numbers[value]}"
        case None | bool() | int() | str():
            return repr(value)
        case float():
            return f"{value!r}" if math.isfinite(value) else f"float {value}"
        case complex():
            return f"complex {value!r}"
        case tuple() | list():
            return f"{type(value).__name__}[{', '.join(map(inner, value))}]"
        case dict():
            return f"{{{', '.join(f'{inner(key)}: {inner(item)}' for key, item in value.items())}}}"
        case slice():
            return f"slice({inner(value.start)}, {inner(value.stop)}, {inner(value.step)})"
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            raise KeyingError("an argument is a dynamic size that no node gives")
    if isinstance(value, _PLAIN_TORCH) or value is ...:
        return str(value)
    if callable(value):
        return _function(value, digest_of)
    raise KeyingError(f"an argument is a {type(value).__name__}")


def _input_line(value: Any, example: Any, names: Mapping[sympy.Symbol, str]) -> str:
    match value:
        case torch.SymInt():
            return f"size {_size(value, names)}"
        case torch.Tensor():
            sizes = ", ".join(_size(size, names) for size in value.shape)
            strides = ", ".join(_size(stride, names) for stride in value.stride())
            kind = "parameter" if isinstance(example, torch.nn.Parameter) else type(example).__name__
            flags = f"{value.requires_grad} {value.is_conj()} {value.is_neg()} {example.is_inference()}"
            return f"{kind} {value.dtype} [{sizes}] [{strides}] {value.layout} {value.device} {flags}"
        case None | bool() | int() | float() | str():
            return f"value {value!r}"
    raise KeyingError(f"an input is a {type(value).__name__}")


def _size(size: Any, names: Mapping[sympy.Symbol, str]) -> str:
    if not isinstance(size, torch.SymInt):
        return str(int(size))
    expression = expression_of(size)
    return str(expression.xreplace({symbol: sympy.Symbol(name, integer=True) for symbol, name in names.items()}))


def _range_of(symbol: sympy.Symbol, values: Sequence[Any]) -> str:
    for value in values:
        sizes = [value] if isinstance(value, torch.SymInt) else getattr(value, "shape", ())
        for size in sizes:
            if isinstance(size, torch.SymInt):
                known = size.node.shape_env.var_to_range.get(symbol)
                return f"{known.lower}..{known.upper}" if known is not None else "any"
    return "any"


def _sharing(example_inputs: Sequence[Any]) -> list[str]:
    """Which inputs lie in one memory, and where in it."""
    groups: dict[int, list[str]] = {}
    for i, value in enumerate(example_inputs):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            groups.setdefault(value.untyped_storage()._cdata, []).append(f"{i} at {value.storage_offset()}")
    return [f"share {'; '.join(group)}" for group in groups.values() if len(group) > 1]
