"""`k31::sparse_flash_attention` by the C++ kernel: check, describe, call."""

from __future__ import annotations

import torch

from k31compile.kernels import paging
from k31compile.kernels.checks import check_attention, check_attention_words
from k31compile.kernels.cpu import calls, loader
from k31compile.kernels.registry import Provider
from k31compile.kernels.visibility import check_lengths, check_mask


def attention_provider(variant: str = "fast") -> Provider:
    """The provider that runs one build variant of the kernel."""

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sparse_indices: torch.Tensor,
        scale_value: float,
        *,
        block_table: torch.Tensor | None = None,
        actual_seq_lengths_query: torch.Tensor | None = None,
        actual_seq_lengths_kv: torch.Tensor | None = None,
        query_rope: torch.Tensor | None = None,
        key_rope: torch.Tensor | None = None,
        sparse_block_size: int = 1,
        layout_query: str = "BSND",
        layout_kv: str = "BSND",
        sparse_mode: int = 3,
        attention_mode: int = 2,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_attention_words(layout_query, sparse_block_size, attention_mode)
        check_attention(query, key, value, sparse_indices, block_table, query_rope, key_rope, layout_kv, attention_mode)
        rows = (query.shape[0], query.shape[1])
        check_lengths(rows, actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode)
        check_mask(mask, (*rows, paging.positions(key, block_table)), query.device)
        result = torch.empty((*query.shape[:3], value.shape[3]), dtype=query.dtype, device=query.device)
        if result.numel() == 0:
            return result
        query, key, value = calls.readable(query), calls.readable(key), calls.readable(value)
        query_rope = None if query_rope is None else calls.readable(query_rope)
        key_rope = None if key_rope is None else calls.readable(key_rope)
        if sparse_indices.dtype not in (torch.int32, torch.int64):
            sparse_indices = sparse_indices.to(torch.int32)
        indices = calls.readable(sparse_indices)
        table = calls.integers(block_table)
        lengths_query, lengths_kv = (
            calls.integers(actual_seq_lengths_query),
            calls.integers(actual_seq_lengths_kv),
        )
        limit = paging.positions(key, table)
        mask = calls.maskable(mask)
        arguments = calls.AttentionCall(
            calls.operand(query),
            calls.operand(query_rope),
            calls.operand(key),
            calls.operand(key_rope),
            calls.operand(value),
            calls.paging(table, key),
            calls.lengths(lengths_query, lengths_kv, sparse_mode, rows, limit),
            calls.mask(mask),
            indices.data_ptr(),
            indices.element_size(),
            indices.stride(0),
            indices.stride(1),
            indices.shape[3],
            query.shape[2],
            key.shape[2],
            query.shape[3],
            0 if query_rope is None else query_rope.shape[3],
            value.shape[3],
            scale_value,
            torch.get_num_threads(),
            result.data_ptr(),
            calls.DTYPES[result.dtype],
        )
        loader.call(variant, "k31_sparse_attention", arguments, limit)
        return result

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _declines)


def _declines(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_args: object,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    **_kwargs: object,
) -> str | None:
    return calls.unread(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
