"""`k31::lightning_indexer` by the C++ kernel: check, describe, call."""

from __future__ import annotations

import torch

from k31compile.kernels import paging
from k31compile.kernels.checks import check_indexer, check_indexer_words
from k31compile.kernels.cpu import calls, loader
from k31compile.kernels.registry import Provider
from k31compile.kernels.visibility import check_lengths, check_mask


def indexer_provider(variant: str = "fast") -> Provider:
    """The provider that runs one build variant of the kernel."""

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        weights: torch.Tensor,
        *,
        actual_seq_lengths_query: torch.Tensor | None = None,
        actual_seq_lengths_key: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        layout_query: str = "BSND",
        layout_key: str = "BSND",
        sparse_count: int = 2048,
        sparse_mode: int = 3,
        order: str = "position",
        tail: str = "minus_one",
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_indexer_words(layout_query, order, tail)
        check_indexer(query, key, weights, block_table, layout_key, sparse_count, tail)
        rows = (query.shape[0], query.shape[1])
        check_lengths(rows, actual_seq_lengths_query, actual_seq_lengths_key, sparse_mode)
        check_mask(mask, (*rows, paging.positions(key, block_table)), query.device)
        result = torch.empty((*rows, 1, sparse_count), dtype=torch.int32, device=query.device)
        if result.numel() == 0:
            return result
        query, key = calls.readable(query), calls.readable(key)
        weights = weights if weights.dtype in calls.DTYPES else weights.float()
        table = calls.integers(block_table)
        lengths_query, lengths_key = (
            calls.integers(actual_seq_lengths_query),
            calls.integers(actual_seq_lengths_key),
        )
        limit = paging.positions(key, table)
        mask = calls.maskable(mask)
        arguments = calls.IndexerCall(
            calls.operand(query),
            calls.operand(key),
            calls.operand(weights),
            calls.paging(table, key),
            calls.lengths(lengths_query, lengths_key, sparse_mode, rows, limit),
            calls.mask(mask),
            query.shape[2],
            query.shape[3],
            sparse_count,
            order == "score",
            tail == "lowest",
            torch.get_num_threads(),
            result.data_ptr(),
        )
        loader.call(variant, "k31_lightning_indexer", arguments, limit)
        return result

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _declines)


def _declines(query: torch.Tensor, key: torch.Tensor, *_args: object, **_kwargs: object) -> str | None:
    if query.shape[2:3] == (0,):
        return "a query without heads has nothing to score"
    return calls.unread(query=query, key=key)
