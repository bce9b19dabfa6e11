"""`k31::attn_res_prepare` and `k31::attn_res_update` by the C++ kernels: describe, call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from k31compile.kernels.arguments import taking
from k31compile.kernels.attn_res_arguments import Prepare, Update
from k31compile.kernels.cpu import calls, loader
from k31compile.kernels.registry import Provider


def prepare_provider(variant: str = "fast") -> Provider:
    """The provider that runs one build variant of the first phase."""

    @taking(Prepare)
    def run(call: Prepare) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        maximum, total, third = call.new_results()
        banks, queries, mask = [calls.readable(bank) for bank in call.banks], calls.readable(call.queries), call.mask()
        mask = None if mask is None else mask.to("cpu").contiguous()
        sums = calls.sum_operands(banks)
        arguments = calls.AttnResPrepareCall(
            calls.row_operand(queries),
            ctypes.addressof(sums),
            0 if mask is None else mask.data_ptr(),
            call.bank.shape[0],
            len(sums),
            *queries.shape,
            call.eps,
            torch.get_num_threads(),
            maximum.data_ptr(),
            total.data_ptr(),
            third.data_ptr() if call.mix else 0,
            0 if call.mix else third.data_ptr(),
        )
        loader.call(variant, "k31_attn_res_prepare", arguments, 0)
        return maximum, total, third

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _prepare_declines)


def _prepare_declines(
    bank: torch.Tensor,
    queries: torch.Tensor,
    *_args: Any,
    more: Sequence[torch.Tensor] | None = None,
    **_kwargs: Any,
) -> str | None:
    return calls.unread(bank=bank, queries=queries, **_numbered("more", more))


def update_provider(variant: str = "fast") -> Provider:
    """The provider that runs one build variant of the second phase."""

    @taking(Update)
    def run(call: Update) -> tuple[torch.Tensor, torch.Tensor]:
        result, mixed = call.new_results()
        maximum, total, mixture = (tensor.float() for tensor in call.prepared)
        partial, mixture, query = (calls.readable(x) for x in (call.partial, mixture, call.query))
        delta, norm_weight = (None if x is None else calls.readable(x) for x in (call.delta, call.norm_weight))
        banks = [calls.readable(bank) for bank in call.bank or ()]
        sums = calls.sum_operands(banks)
        arguments = calls.AttnResUpdateCall(
            calls.row_operand(partial),
            calls.row_operand(delta),
            calls.number_operand(maximum),
            calls.number_operand(total),
            calls.row_operand(mixture),
            calls.row_operand(query),
            calls.row_operand(norm_weight),
            0 if call.bank is None else ctypes.addressof(sums),
            len(sums),
            *partial.shape,
            call.eps,
            call.norm_eps,
            torch.get_num_threads(),
            result.data_ptr(),
            mixed.data_ptr(),
            calls.DTYPES[mixed.dtype],
        )
        loader.call(variant, "k31_attn_res_update", arguments, 0)
        return result, mixed

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _update_declines)


def _update_declines(
    partial: torch.Tensor,
    delta: torch.Tensor | None,
    maximum: torch.Tensor,
    total: torch.Tensor | None = None,
    mixture: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    bank: Sequence[torch.Tensor] | None = None,
    **_kwargs: Any,
) -> str | None:
    if dtype not in (None, *calls.DTYPES):
        return f"the result is {dtype}; the kernel writes float32 and bfloat16"
    named = {"maximum": maximum, "total": total, "mixture": mixture, "query": query, "norm_weight": norm_weight}
    return calls.unread(partial=partial, delta=delta, **named, **_numbered("bank", bank))


def _numbered(name: str, tensors: Sequence[torch.Tensor] | None) -> dict[str, torch.Tensor]:
    return {f"{name}[{i}]": tensor for i, tensor in enumerate(tensors or ())}
