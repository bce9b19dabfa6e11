"""A graph of k31 and ATen operators becomes one of torch_npu and ATen operators that torchair has converters for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import k31compile.targets.ascend.lowerings  # noqa: F401  (registers them)
from k31compile.errors import TargetError
from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import value_of
from k31compile.graph.source import source_line
from k31compile.graph.views import COPIES, is_view
from k31compile.targets.ascend.converters import refuse_without_converter
from k31compile.targets.ascend.decompositions import coordinates_along, decomposition_table
from k31compile.targets.ascend.fuse_rms_norm import fuse_rms_norms
from k31compile.targets.ascend.indexer_weights import narrow_indexer_weights
from k31compile.targets.ascend.lowerings.registry import Decision, choose
from k31compile.targets.ascend.own_operators import Place, states_lie_in
from k31compile.targets.ascend.profiles import Profile
from k31compile.targets.ascend.share_equal import drop_dead_copies, share_equal_calls
from k31compile.targets.ascend.state_places import find_state_places
from k31compile.targets.reinplace import reinplace_cache_writes

_WRITES = (ATEN.index_put_.default, ATEN.index_copy_.default)


@dataclass(frozen=True)
class Lowered:
    """A graph for a product: its module, fake inputs, and which provider each k31 call got and why."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    decisions: tuple[Decision, ...]


def lower(module: fx.GraphModule, profile: Profile) -> Lowered:
    """Lower a graph that went through the passes; `module` is changed where cache writes become writes in place.

    Raises:
        TargetError: a k31 operator has no lowering for its arguments, or GE no converter for what a graph for it has.
    """
    reinplace_cache_writes(module)
    narrow_indexer_weights(module, profile)
    lowering = _Lowering(module, profile)
    # With what the model's lines were, which every node of a formula then has.
    with FakeTensorMode(), torch.no_grad(), fx_traceback.preserve_node_meta():
        inputs = tuple(_like(value_of(node)) for node in module.graph.find_nodes(op="placeholder"))
        lowered = make_fx(lowering.run, decomposition_table=decomposition_table(), tracing_mode="real")(*inputs)
        drop_dead_copies(lowered.graph)
        share_equal_calls(lowered.graph)
        fuse_rms_norms(lowered.graph, profile)
    _move_constants(lowered.graph)
    lowered.graph.eliminate_dead_code()
    lowered.recompile()
    if profile.path == "ge":
        refuse_without_converter(lowered.graph)
    return Lowered(lowered, inputs, tuple(lowering.decisions))


def _like(value: Any) -> Any:
    """A fake tensor of the mode that is active, as the value is; sizes stay what they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")


class _Lowering(fx.Interpreter):
    """Runs the graph on fake tensors, every k31 call by its lowering; what runs is what is recorded."""

    def __init__(self, module: fx.GraphModule, profile: Profile) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.profile = profile
        self.decisions: list[Decision] = []
        self.places = find_state_places(module.graph)
        self._needless: set[fx.Node] = set()
        self._node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), torch.device):
            # The model's own device, such as meta; all of the trace is on one.
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "k31":
            return self._lower(target._opname, args, kwargs)
        if self._node in self._needless:
            return args[0]
        write = {
            ATEN.index_put_.default: lambda *one: self._write_rows(one),
            ATEN.index_copy_.default: self._write_along,
        }
        if target in write:
            written = write[target](*args)
            if written is not None:
                return written
        return super().call_function(target, args, kwargs)

    def _lower(self, operator: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        assert self._node is not None
        try:
            lowering, decision = choose(operator, self.profile, *args, **kwargs)
        except TargetError as error:
            raise TargetError(error.what, source_line(self._node), error.hint) from error
        self.decisions.append(decision)
        found = self.places.get(self._node)
        place = None if found is None else Place(self.env[found.cache], self.env[found.rows])
        with states_lie_in(place):
            result = lowering.run(self.profile, *args, **kwargs)
        if place is not None and place.taken and found is not None:
            self._needless.add(found.write)
        # What follows was decided on the strides that the operator itself gives.
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, result)

    def _write_along(self, cache: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
        """A write along one dimension of a cache, as one scatter in place; None where it is no input of the graph."""
        base = self._cache()
        if base is None or base.shape != cache.shape or not _is_all_of(cache, base):
            return None
        dim %= cache.dim()
        places = coordinates_along(cache.shape[:dim], index)
        rows = source.reshape(places.shape[0], *cache.shape[dim + 1 :]).to(cache.dtype)
        return torch.ops.npu.npu_scatter_nd_update_(base, places, rows)

    def _write_rows(self, args: Sequence[Any]) -> Any:
        """A write of rows into a cache, or into a view of one that joins its first dimensions, as one scatter in place.

        torchair converts no index_put; a scatter names (block, offset) where the view counted slots.
        """
        written, indices, values, *accumulate = args
        base = self._cache()
        # A mask, which uint8 is too, names no places.
        are_places = all(index is not None and index.dtype in (torch.int32, torch.int64) for index in indices)
        if base is None or any(accumulate) or not are_places:
            return None
        indices = torch.broadcast_tensors(*indices)
        places = _places_in(base, written, indices)
        if places is None:
            return None
        rows = values.expand(*indices[0].shape, *written.shape[len(indices) :])
        rows = rows.reshape(places.shape[0], *base.shape[places.shape[1] :])
        updated = torch.ops.npu.npu_scatter_nd_update_(base, places, rows.to(base.dtype))
        return updated.view(written.shape)

    def _cache(self) -> torch.Tensor | None:
        """The input that the write at hand writes, maybe through views and after other writes; None for a value."""
        node = self._node.args[0] if self._node is not None else None
        while isinstance(node, fx.Node) and node.op != "placeholder":
            is_same_memory = node.target in _WRITES or (is_view(node) and node.target not in COPIES)
            node = node.args[0] if is_same_memory else None
        return self.env[node] if isinstance(node, fx.Node) else None


def _places_in(base: torch.Tensor, view: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """[N, dims]: where in a cache the places lie that are named by the first dimensions of a view of it.

    None where the view is not the whole cache in its order, or a place in it is no row of the cache.
    """
    count, size = len(indices), view.shape
    dims = base.dim() - len(size) + count
    if dims < 1 or base.shape[dims:] != size[count:] or not _is_all_of(view, base):
        return None
    if count == 1:
        return unravel(indices[0].reshape(-1), base.shape[:dims])
    columns = [torch.remainder(index.reshape(-1), size[i]) for i, index in enumerate(indices)]
    if size == base.shape:
        return torch.stack(columns, dim=1)
    flat = columns[0]
    for i, column in enumerate(columns[1:], start=1):
        flat = flat * size[i] + column
    return unravel(flat, base.shape[:dims])


def _is_all_of(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view is all of its base in the same order: no part of it, and nothing transposed."""
    same = view.shape == base.shape and view.stride() == base.stride()
    return view.numel() == base.numel() and (same or (view.is_contiguous() and base.is_contiguous()))


def unravel(flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """[N, len(shape)]: the coordinates of flat positions; one below 0 counts from the end, as an index does."""
    flat = torch.remainder(flat, math.prod(shape))
    columns = []
    for size in reversed(shape[1:]):
        columns.append(torch.remainder(flat, size))
        flat = torch.div(flat, size, rounding_mode="floor")
    return torch.stack([flat, *reversed(columns)], dim=1)


def _move_constants(graph: fx.Graph) -> None:
    """What the graph makes out of nothing is made on the device: the trace ran with tensors of another one."""
    for node in graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            # make_fx says pin_memory=False, which torchair's converters have no word for
            kept = {key: value for key, value in node.kwargs.items() if key != "pin_memory"}
            node.kwargs = {**kept, "device": torch.device("npu")}
