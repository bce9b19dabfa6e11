"""torch_npu's operators on the CPU, by our definitions of what they compute, so that a lowered graph has numbers."""

import inspect
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k31compile.kernels.registry import OPERATORS

_SKIPPED = ("scope_enter", "scope_exit", "wait", "record")


class Emulated(fx.Interpreter):
    """Runs a lowered graph: streams and waits are left out, and what is made on the device is made here.

    As in GE a view is a copy, only an input can be written, and what is copied into one is there when the graph ends;
    `has_views` for code that torch runs.
    """

    def __init__(self, module: fx.GraphModule, has_views: bool = False) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._has_views = has_views
        self._given: tuple[Any, ...] = ()
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The graph's results."""
        self._given, self._copied = args, []
        results = super().run(*args, **kwargs)
        for target, source in self._copied:
            target.copy_(source)
        return results

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One node; an operator of torch_npu that is not known here is an error."""
        kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        if isinstance(target, torch._ops.OpOverload):
            if target.namespace == "npugraph_ex" or (target.namespace == "air" and target._opname in _SKIPPED):
                return None
            if target.namespace == "npu":
                kernel = KERNELS[target._opname]
                if target._schema.is_mutable and not self._has_views:
                    self._check_inputs(target, args)
                return kernel(*args, **{**_defaults(target, kernel), **kwargs})
            if not self._has_views:
                return self._call_as_ge(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _call_as_ge(self, target: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.copy_.default:
            self._check_inputs(target, args)
            value = args[1].to(args[0].dtype).expand(args[0].shape).clone()
            self._copied.append((args[0], value))
            return value
        if target._schema.is_mutable:
            self._check_inputs(target, args)
        value = super().call_function(target, args, kwargs)
        returned = target._schema.returns
        is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, value) if is_view else value

    def _check_inputs(self, target: torch._ops.OpOverload, args: Any) -> None:
        for argument, value in zip(target._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                assert any(value is one for one in self._given), f"{target} writes what is no input"


def _defaults(target: torch._ops.OpOverload, kernel: Any) -> dict[str, Any]:
    """The schema's values of a kernel's keyword arguments: a graph does not repeat them."""
    asked = inspect.signature(kernel).parameters
    return {
        argument.name: argument.default_value
        for argument in target._schema.arguments
        if argument.has_default_value() and argument.name in asked and asked[argument.name].kind.name == "KEYWORD_ONLY"
    }


def _index(query, key, weights, *, actual_seq_lengths_key, block_table, layout_query, layout_key, sparse_count,
           sparse_mode):  # fmt: skip
    assert (layout_query, layout_key, sparse_mode) == ("BSND", "PA_BSND", 0)
    assert actual_seq_lengths_key.shape == query.shape[:1]
    found = OPERATORS["lightning_indexer"].reference(
        query, key, weights, actual_seq_lengths_key=actual_seq_lengths_key, block_table=block_table,
        layout_key=layout_key, sparse_count=sparse_count, sparse_mode=sparse_mode,
    )  # fmt: skip
    return found, torch.empty(0)


def _attend(query, key, value, indices, scale, *, block_table, actual_seq_lengths_kv, query_rope, key_rope,
            sparse_block_size, layout_query, layout_kv, sparse_mode, attention_mode):  # fmt: skip
    # On A3 a power of two, too: tests/targets/test_ascend_constraints.py.
    assert 1 <= query.shape[2] <= 128
    found = OPERATORS["sparse_flash_attention"].reference(
        query, key, value, indices, scale, block_table=block_table, actual_seq_lengths_kv=actual_seq_lengths_kv,
        query_rope=query_rope, key_rope=key_rope, sparse_block_size=sparse_block_size, layout_query=layout_query,
        layout_kv=layout_kv, sparse_mode=sparse_mode, attention_mode=attention_mode,
    )  # fmt: skip
    return found, torch.empty(0), torch.empty(0)


def _gate(x, k, *, bias, k_group, group_count, group_select_mode, renorm, norm_type, routed_scaling_factor, eps):
    assert (renorm, norm_type) == (0, 1)
    weights, chosen = OPERATORS["moe_gating_top_k"].reference(
        x, k, bias=bias, k_group=k_group, group_count=group_count, group_select_mode=group_select_mode,
        routed_scaling_factor=routed_scaling_factor, eps=eps,
    )  # fmt: skip
    return weights, chosen, torch.empty(0)


def _grouped_matmul(x, weight, *, group_list, split_item, group_type, group_list_type):
    assert (split_item, group_type, group_list_type) == (3, 0, 1)
    (rows,), (stack,) = x, weight
    assert int(group_list.sum()) == rows.shape[0]
    parts = rows.split(group_list.tolist())
    return [torch.cat([part @ matrix for part, matrix in zip(parts, stack, strict=True)])]


def _scatter(cache, places, rows):
    cache[tuple(places.unbind(1))] = rows
    return cache


def _recur(query, key, value, state, *, beta, scale, actual_seq_lengths, ssm_state_indices, g=None, gk=None):
    """Each token reads the slot of the one before it, the first of a request its own, and writes its own slot."""
    assert {x.dtype for x in (query, key, value, beta, state)} == {torch.bfloat16}
    state = state.clone()
    output, start = torch.empty_like(value), 0
    for length in actual_seq_lengths.tolist():
        assert length <= 8
        slot = ssm_state_indices[start]
        for token in range(start, start + length):
            decay = g[token][:, None, None] if gk is None else gk[token][:, None]
            carried = state[slot].float() * decay.exp()
            k, v = key[token].float(), value[token].float()
            update = beta[token].float()[:, None] * (v - (carried * k[:, None]).sum(-1))
            carried = carried + update[:, :, None] * k[:, None]
            slot = ssm_state_indices[token]
            state[slot] = carried.to(state.dtype)
            output[token] = ((carried * query[token].float()[:, None]).sum(-1) * scale).to(output.dtype)
        start += length
    return output, state


def _rms_norm(x, weight, epsilon):
    wide = x.float() if x.element_size() == 2 else x
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype), scale


KERNELS = {
    "npu_rms_norm": _rms_norm,
    "npu_recurrent_gated_delta_rule_functional": _recur,
    "npu_lightning_indexer": _index,
    "npu_sparse_flash_attention": _attend,
    "npu_moe_gating_top_k": _gate,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_scatter_nd_update_": _scatter,
}
