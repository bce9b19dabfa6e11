"""A graph of k31 and ATen operators becomes one of torch_npu and ATen operators that torchair has converters for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
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
from k31compile.targets.ascend.decompositions import decomposition_table
from k31compile.targets.ascend.fuse_rms_norm import fuse_rms_norms
from k31compile.targets.ascend.index_puts import index_put
from k31compile.targets.ascend.indexer_weights import narrow_indexer_weights
from k31compile.targets.ascend.lowerings.registry import Decision, choose
from k31compile.targets.ascend.own_operators import Place, states_lie_in
from k31compile.targets.ascend.plain_formulas import COMPOSITES
from k31compile.targets.ascend.profiles import Profile
from k31compile.targets.ascend.share_equal import drop_dead_copies, share_equal_calls
from k31compile.targets.ascend.state_places import find_state_places
from k31compile.targets.ascend.writes import refuse_writes_into_views, write_along, write_part, write_rows
from k31compile.targets.reinplace import reinplace_cache_writes

_FUNCTIONAL = {ATEN.scatter_.src: ATEN.scatter.src, ATEN.scatter_.value: ATEN.scatter.value}
_WRITES = (ATEN.index_put_.default, ATEN.index_copy_.default, ATEN.copy_.default, *_FUNCTIONAL)


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
        lowered = lowering.trace(inputs)
        drop_dead_copies(lowered.graph)
        share_equal_calls(lowered.graph)
        fuse_rms_norms(lowered.graph, profile)
    _move_constants(lowered.graph)
    lowered.graph.eliminate_dead_code()
    lowered.recompile()
    if profile.path == "ge":
        refuse_without_converter(lowered.graph)
        refuse_writes_into_views(lowered.graph)
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
        self._caches: dict[fx.Node, Any] = {}
        self._node: fx.Node | None = None

    def trace(self, inputs: Sequence[Any]) -> fx.GraphModule:
        """The lowered graph.

        Raises:
            TargetError: a size or a number in it depends on the values of a tensor.
        """
        try:
            return make_fx(self.run, decomposition_table=decomposition_table(), tracing_mode="real")(*inputs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            assert self._node is not None
            raise TargetError(
                f"what {error.func} gives depends on the values of a tensor, and graphs for {self.profile.name} are of "
                "fixed sizes and numbers",
                source_line(self._node),
                "write it with masks of fixed sizes, such as torch.where, or keep it out of the compiled function",
            ) from None

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        result = super().run_node(n)
        if n.op == "placeholder":
            self._caches[n] = result
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), torch.device):
            # The model's own device, such as meta; all of the trace is on one.
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "k31":
            return self._lower(target._opname, args, kwargs)
        if self._node in self._needless:
            return args[0]
        if target in COMPOSITES and (written := COMPOSITES[target](*args, **kwargs)) is not NotImplemented:
            return written
        if target in _WRITES:
            written = self._write(target, args, kwargs)
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

    def _write(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A write into an input of the graph, maybe through views, as one in place on the input; None for others."""
        assert self._node is not None
        found = self._written_input()
        if found is None or kwargs:
            return None
        cache, views = found
        base = self._caches[cache]
        if target is ATEN.index_put_.default:
            written, indices, values, *accumulate = args
            updated = None if any(accumulate) else write_rows(base, written, indices, values)
            if updated is None:
                # No list of rows: all that is written into is made anew and takes its place.
                put = index_put(written, indices, values, any(accumulate))
                updated = None if put is NotImplemented else write_part(base, written, put)
        elif target is ATEN.index_copy_.default:
            updated = write_along(base, *args)
        elif target is ATEN.copy_.default:
            updated = write_part(base, args[0], args[1]) if views else None
        else:
            # What has a converter is the scatter that makes a new value.
            updated = write_part(base, args[0], _FUNCTIONAL[target](*args))
        if updated is None:
            return None
        # Who reads the cache or a view of it from here on reads what the write gives: in GE a view made before is old.
        self._renew(cache, updated)
        return self._again(views, updated)

    def _written_input(self) -> tuple[fx.Node, list[fx.Node]] | None:
        """The input that the write at hand writes, and the views through which it does; None for a value."""
        assert self._node is not None
        views: list[fx.Node] = []
        node = self._node.args[0]
        while isinstance(node, fx.Node) and node.op != "placeholder":
            if node.target not in _WRITES:
                if not is_view(node) or node.target in COPIES:
                    return None
                views.insert(0, node)
            node = node.args[0]
        return (node, views) if isinstance(node, fx.Node) else None

    def _renew(self, node: fx.Node, value: Any) -> None:
        """Put a value in the place of one that was written, and take all views of it anew."""
        self.env[node] = value
        for user in node.users:
            is_same = user in self.env and bool(user.args) and user.args[0] is node
            if is_same and user.target in _WRITES:
                self._renew(user, value)
            elif is_same and is_view(user) and user.target not in COPIES:
                self._renew(user, self._again([user], value))

    def _again(self, views: Sequence[fx.Node], cache: torch.Tensor) -> Any:
        """The same views of a cache that was written."""
        value: Any = cache
        for view in views:
            args, kwargs = self.fetch_args_kwargs_from_env(view)
            value = view.target(value, *args[1:], **kwargs)  # type: ignore[operator]
        return value


def _move_constants(graph: fx.Graph) -> None:
    """What the graph makes out of nothing is made on the device: the trace ran with tensors of another one."""
    for node in list(graph.nodes):
        if node.op == "get_attr":
            _move_constant(graph, node)
        elif isinstance(node.kwargs.get("device"), torch.device):
            # make_fx says pin_memory=False, which torchair's converters have no word for
            kept = {key: value for key, value in node.kwargs.items() if key != "pin_memory"}
            node.kwargs = {**kept, "device": torch.device("npu")}


def _move_constant(graph: fx.Graph, node: fx.Node) -> None:
    """A tensor that the model's lines have in them, such as `torch.tensor([1.0, 2.0])`, is copied to the device."""
    with graph.inserting_after(node):
        moved = graph.call_function(ATEN._to_copy.default, (node,), {"device": torch.device("npu")})
    moved.meta = dict(node.meta)
    for user in list(node.users):
        if user is not moved:
            user.replace_input_with(node, moved)
