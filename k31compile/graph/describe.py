"""What a confirmation is about, to the last detail: the region, and how its leaves are read as operands.

Two texts are equal only where the same nodes would be run on the same samples and judged in the same way; names of
nodes and symbols, lines of code and weights are not in them. Whatever is met that has no text of its own stands as the
very object, so that a text may hold in this process alone, and never means two things.
"""

import hashlib
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import sympy
import torch
from torch import fx

from k31compile.graph.region import Region, attribute_of
from k31compile.graph.sizes import value_of

_OUR_PACKAGE = "k31compile."
# Operators that the versions of torch and of this package tell; anybody may define others, and define them anew.
_KNOWN_NAMESPACES = {"aten", "prims", "k31"}
_PLAIN_MODULES = {"builtins": None, "_operator": operator, "operator": operator, "math": math}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Described:
    """A text, whether it means the same in every process, and the objects that it names by their place in this one."""

    text: str
    is_portable: bool
    held: tuple[object, ...]

    @property
    def digest(self) -> str:
        """The text in 64 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()


class Describer:
    """Texts of one region and of what is read in it; `held` grows by what has no text of its own."""

    def __init__(self, region: Region) -> None:
        """Describe `region`; nodes are numbered from the outputs upwards, whatever their order in the graph."""
        self.region_described = region
        self._held: list[object] = []
        self._is_outside = False
        self._symbols: dict[sympy.Symbol, str] = {}
        self._names: dict[fx.Node, str] = {leaf: f"leaf{i}" for i, leaf in enumerate(region.leaves)}
        self._within = set(region.nodes)
        lines = [f"{self._names[leaf]}: {self._value(value_of(leaf))}" for leaf in region.leaves]
        for output in region.outputs:
            lines += self._lines_above(output)
        for node in region.nodes:
            lines += self._lines_above(node)
        lines.append(f"gives {', '.join(self._names[output] for output in region.outputs)}")
        self._region = self._described("\n".join(lines))

    @property
    def region(self) -> Described:
        """The region itself."""
        return self._region

    def reading(self, reading: object, left_out: Iterable[str] = ()) -> Described:
        """All that a reading holds but for the attributes `left_out`, which must decide nothing."""
        state = {name: value for name, value in vars(reading).items() if name not in left_out}
        return self._described(f"{self._class(type(reading))} {self._text(state)}")

    def _described(self, text: str) -> Described:
        return Described(text, not self._held, tuple(self._held))

    def _lines_above(self, last: fx.Node) -> list[str]:
        """A line for each node above and including `last` that has none yet, each after those that it reads."""
        lines: list[str] = []
        todo = [last]
        while todo:
            node = todo[-1]
            waiting = [s for s in node.all_input_nodes if s in self._within and s not in self._names]
            if node in self._names or not waiting:
                todo.pop()
                if node not in self._names:
                    line = self._line(node)
                    self._names[node] = f"n{len(self._names)}"
                    lines.append(f"{self._names[node]} = {line}")
            else:
                todo += reversed(waiting)
        return lines

    def _line(self, node: fx.Node) -> str:
        value = self._value(value_of(node))
        if node.op == "call_function":
            return f"{self._target(node.target)}{self._text(tuple(node.args))}{self._text(dict(node.kwargs))}: {value}"
        if node.op == "get_attr":
            return f"constant {self._content(node)}: {value}"
        return f"{node.op}: {value}"

    def _target(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload) and target.namespace in _KNOWN_NAMESPACES:
            return str(target)
        name, home = getattr(target, "__name__", ""), getattr(target, "__module__", None)
        if home in _PLAIN_MODULES and getattr(_PLAIN_MODULES[home], name, None) is target:
            return f"{home}.{name}"
        if name.startswith("sym_") and getattr(torch, name, None) is target:
            return f"torch.{name}"
        return self._itself(target)

    def _content(self, node: fx.Node) -> str:
        """A constant by its values: two masks of one shape are two regions."""
        tensor = attribute_of(node)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            return self._itself(tensor)
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return self._itself(tensor)
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()} {hashlib.sha256(values.tobytes()).hexdigest()}"

    def _value(self, value: Any) -> str:
        """What is known of a node's value before anything runs: kind, type, sizes, strides, device."""
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return self._itself(value)
            sizes, strides = (",".join(map(self._size, of)) for of in (value.shape, value.stride()))
            return f"{value.dtype}[{sizes}|{strides}|{self._size(value.storage_offset())}]{value.device.type}"
        if isinstance(value, tuple | list):
            return f"({', '.join(map(self._value, value))})"
        return self._size(value)

    def _size(self, size: Any) -> str:
        """A number, or an expression of symbols that are numbered by first use, with what each was when traced."""
        if type(size) in _PLAIN:
            return repr(size)
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._itself(size)
        env, expression = size.node.shape_env, sympy.sympify(size.node.expr)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._symbols:
                self._symbols[symbol] = f"s{len(self._symbols)}={getattr(env, 'backed_var_to_val', {}).get(symbol)}"
        plain = {symbol: sympy.Symbol(self._symbols[symbol]) for symbol in expression.free_symbols}
        return f"{type(size).__name__} {sympy.srepr(expression.xreplace(plain))}"

    def _text(self, value: Any) -> str:
        """Anything that an argument of a node, or an attribute of a reading, may be."""
        if type(value) in _PLAIN or isinstance(value, _TORCH_PLAIN):
            return repr(value)
        if isinstance(value, fx.Node):
            return self._names.get(value) or self._outside(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._size(value)
        if isinstance(value, Region):
            return self._other_region(value)
        if isinstance(value, slice):
            return f"slice{self._text((value.start, value.stop, value.step))}"
        if isinstance(value, tuple | list):
            # A graph's own lists and tuples are of several kinds; what they are to an operator is the same.
            return f"({', '.join(map(self._text, value))},)"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self._text, value)))}}}"
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{self._text(key)}: {self._text(part)}' for key, part in value.items()))}}}"
        if is_dataclass(value) and not isinstance(value, type):
            parts = (f"{one.name}={self._text(getattr(value, one.name))}" for one in fields(value))
            return f"{self._class(type(value))}({', '.join(parts)})"
        return self._itself(value)

    def _outside(self, node: fx.Node) -> str:
        """A node that is neither leaf nor inside: its operator, its plain arguments, and what values look like."""
        value = self._value(value_of(node))
        if self._is_outside or node.op != "call_function":
            return f"outside {node.op}: {value}"
        self._is_outside = True
        text = f"{self._target(node.target)}{self._text(tuple(node.args))}{self._text(dict(node.kwargs))}"
        self._is_outside = False
        return f"outside {text}: {value}"

    def _other_region(self, region: Region) -> str:
        if region is self.region_described:
            return "the region"
        other = Describer(region)
        self._held += other.region.held
        return f"region({other.region.text}; of {', '.join(map(self._text, region.leaves))})"

    def _class(self, cls: type) -> str:
        """A class of ours by name, since the sources are part of what is remembered; any other as itself."""
        name = f"{cls.__module__}.{cls.__qualname__}"
        return name if name.startswith(_OUR_PACKAGE) and "<locals>" not in name else self._itself(cls)

    def _itself(self, thing: object) -> str:
        self._held.append(thing)
        return f"<{type(thing).__qualname__} at {id(thing):#x}>"
