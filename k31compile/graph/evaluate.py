"""Run a region as it stands in the user's graph, in float64, on tensors of our choice."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from k31compile.graph.region import Region, attribute_of
from k31compile.graph.sizes import Substitution, is_float, substitute, value_of

Values = dict[fx.Node, Any]


def run_in_float64(region: Region, leaves: Mapping[fx.Node, torch.Tensor], substitution: Substitution) -> list[Any]:
    """The values of the region's outputs for these leaf values, every floating type raised to float64.

    Casts and dtype arguments become float64 too: the run shows the algebra, not the rounding.
    """
    with float64_by_default():
        return _run(region, leaves, substitution, _raise)


def run_as_written(region: Region, leaves: Mapping[fx.Node, torch.Tensor], substitution: Substitution) -> list[Any]:
    """The values of the region's outputs in the author's own dtypes: the run shows where the author rounds."""
    return _run(region, leaves, substitution, _on_cpu)


def coarsest_unit(region: Region) -> float:
    """The largest unit in the last place of all floating types of a region, for a number near one."""
    nodes = [node for node in (*region.leaves, *region.nodes) if is_float(node)]
    return max(torch.finfo(value_of(node).dtype).eps for node in nodes)


def _run(
    region: Region, leaves: Mapping[fx.Node, torch.Tensor], substitution: Substitution, change: Callable[[Any], Any]
) -> list[Any]:
    values: Values = dict(leaves)
    last_use = _last_uses(region)
    with torch.no_grad():
        for i, node in enumerate(region.nodes):
            values[node] = _run_node(node, values, substitution, change)
            for dead in last_use.get(i, ()):
                values.pop(dead, None)
    return [values[output] for output in region.outputs]


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Factories and quotients of integers give the default type: it must not bring float32's rounding in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _run_node(node: fx.Node, values: Values, substitution: Substitution, change: Callable[[Any], Any]) -> Any:
    known = value_of(node)
    if isinstance(known, torch.SymInt):
        return substitute(known, substitution)
    if node.op == "placeholder":
        return known
    if node.op == "get_attr":
        return change(attribute_of(node))

    def argument(source: fx.Node) -> Any:
        if source in values:
            return values[source]
        lent = value_of(source)
        if isinstance(lent, torch.SymInt):
            return substitute(lent, substitution)
        if isinstance(lent, torch.Tensor):
            # It lends its shape and type and nothing else (new_zeros, copy): any values do.
            shape = [substitute(size, substitution) for size in lent.shape]
            return torch.zeros(shape, dtype=change(lent.dtype))
        return lent

    args = _changed(fx.map_arg(_shrink(node.args, substitution), argument), change)
    kwargs = _changed(fx.map_arg(_shrink(dict(node.kwargs), substitution), argument), change)
    if not callable(node.target):
        raise TypeError(f"{node.op} {node.target} cannot be run alone")
    with torch.no_grad():
        result = _RULES.get(node.target, node.target)(*args, **kwargs)
    if isinstance(result, torch.Tensor) and node.target in _MAKES_FLOAT and is_float(node):
        return change(result)
    return result


# Factories without a dtype argument make float32; the others follow their inputs.
_MAKES_FLOAT = {
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
    torch.ops.aten.full.default,
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.eye.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.aten.lift_fresh_copy.default,
}


def _grouped_product(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Rows [S, in], sorted by group, times the matrix [G, in, out] of their group; rows of no group give zeros."""
    if ends is None or bias is not None or (rows.dim(), matrices.dim()) != (2, 3):
        raise NotImplementedError("a grouped product of another form than rows by groups")
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    begin = 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        out[begin:end] = rows[begin:end] @ matrix
        begin = end
    return out


# Operators that refuse float64.
_RULES: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: _grouped_product}


def raised(value: Any) -> Any:
    """Every floating tensor and dtype in a nest of arguments as float64."""
    if isinstance(value, torch.Tensor | torch.dtype):
        return _raise(value)
    if isinstance(value, dict):
        return {key: raised(part) for key, part in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([raised(part) for part in value])
    return value


def _as_float64(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float64) if value.dtype.is_floating_point and value.dtype != torch.float64 else value


def _shrink(argument: Any, substitution: Substitution) -> Any:
    """Plain numbers under the substitution; sizes are all that it names."""
    if type(argument) is int:
        return substitution.get(argument, argument)
    if isinstance(argument, dict):
        return {key: _shrink(value, substitution) for key, value in argument.items()}
    if isinstance(argument, list | tuple) and not isinstance(argument, torch.Size):
        return type(argument)(_shrink(value, substitution) for value in argument)
    return argument


def _changed(argument: Any, change: Callable[[Any], Any]) -> Any:
    """An argument with every dtype and device in it changed; tensors are values already."""
    if isinstance(argument, torch.dtype | torch.device):
        return change(argument)
    if isinstance(argument, dict):
        return {key: _changed(value, change) for key, value in argument.items()}
    if isinstance(argument, list | tuple):
        return type(argument)(_changed(value, change) for value in argument)
    return argument


def _raise(value: Any) -> Any:
    """A tensor, dtype or device for the run in float64."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return _as_float64(value) if isinstance(value, torch.Tensor) else _on_cpu(value)


def _on_cpu(value: Any) -> Any:
    """A tensor, dtype or device for the run as written: runs are on the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _last_uses(region: Region) -> dict[int, list[fx.Node]]:
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(region.nodes):
        for source in node.all_input_nodes:
            last[source] = i
    keep = set(region.outputs)
    dead: dict[int, list[fx.Node]] = {}
    for node, i in last.items():
        if node not in keep:
            dead.setdefault(i, []).append(node)
    return dead
