"""Conditions on dynamic sizes as plain data: nested lists, asked with the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Condition = Any
"""A number, the name of a size, or [operator, operand, ...]."""


def _sum(*values: int) -> int:
    return sum(values)


def _product(*values: int) -> int:
    result = 1
    for value in values:
        result *= value
    return result


_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": _sum,
    "*": _product,
    "**": lambda base, power: base**power,
    "//": lambda left, right: left // right,
    "%": lambda left, right: left % right,
    "min": min,
    "max": max,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "and": lambda *values: all(values),
    "or": lambda *values: any(values),
    "not": lambda value: not value,
}

_OF_SYMPY = {
    "Add": "+",
    "Mul": "*",
    "Pow": "**",
    "PowByNatural": "**",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "Min": "min",
    "Max": "max",
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
    "And": "and",
    "Or": "or",
    "Not": "not",
}


def to_data(expression: Any, names: Mapping[str, str]) -> Condition:
    """A sympy expression over symbols that have names here, as plain data.

    Raises:
        ValueError: it holds something that this cannot write.
    """
    if expression.is_Symbol and str(expression) in names:
        return names[str(expression)]
    if getattr(expression, "is_Integer", False):
        return int(expression)
    operator = _OF_SYMPY.get(type(expression).__name__)
    if operator is None or (operator == "**" and not _is_power(expression)):
        raise ValueError(str(expression))
    return [operator, *(to_data(argument, names) for argument in expression.args)]


def _is_power(expression: Any) -> bool:
    return bool(expression.args[1].is_Integer and expression.args[1] >= 0)


def value_of(condition: Condition, sizes: Mapping[str, int]) -> Any:
    """What a condition is with these sizes."""
    if isinstance(condition, str):
        return sizes[condition]
    if isinstance(condition, list):
        operator, *operands = condition
        return _OPERATORS[operator](*(value_of(operand, sizes) for operand in operands))
    return condition


def told(condition: Condition) -> str:
    """A condition as a user reads it."""
    if not isinstance(condition, list):
        return str(condition)
    operator, *operands = condition
    words = [told(operand) for operand in operands]
    if operator in ("min", "max", "not"):
        return f"{operator}({', '.join(words)})"
    return f" {operator} ".join(f"({word})" if " " in word else word for word in words)
