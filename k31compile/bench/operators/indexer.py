"""`lightning_indexer`: 64 heads of 128, against scores and torch.topk; prefill against causally trimmed chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from k31compile.bench.case import Case, Form, Roof, Thunk, Work
from k31compile.bench.compare import selection_differs
from k31compile.bench.dtypes import has_bf16_products, short_name
from k31compile.bench.goals import Bound, Goals
from k31compile.model.indexer import index_scores

_HEADS, _WIDTH = 64, 128
_CHUNK = 128  # query rows that a baseline's prefill scores at once
_OURS, _PLAIN = 1e-4, 2e-2  # of the largest score: sums in float32; bfloat16 sums and scores


def cases() -> list[Case]:
    """Decode for one and four rows, prefill, and rows that see no more than they select."""
    bf16, fp32 = torch.bfloat16, torch.float32
    made = []
    for dtype, rows, goals in (
        (bf16, 1, {4096: (3.5, 2.8, 3.0), 16384: (4.0, 2.8, 3.0), 65536: (5.0, 4.0, 5.0)}),
        (bf16, 4, dict.fromkeys((4096, 16384), (2.4, 2.0, 2.5))),
        (fp32, 1, dict.fromkeys((4096, 16384, 65536), (1.5, 1.25, 1.4))),
    ):
        roof = Bound(0.70, 0.60) if dtype == fp32 else Bound(0.80, 0.75) if rows == 1 else Bound(0.85, None)
        series = f"lightning_indexer decode {short_name(dtype)} T={rows}"
        for positions, (goal, must, must_eager) in goals.items():
            held = Goals({"inductor": Bound(goal, must), "eager": Bound(None, must_eager)}, roof)
            label = f"decode {short_name(dtype)} T={rows} S={positions} K=2048"
            make = partial(_decode, dtype, rows, positions, 2048)
            made.append(Case("lightning_indexer", label, make, held, series, positions, positions == 4096))
    for dtype, bound, must_eager in ((bf16, Bound(1.9, 1.6), 2.5), (fp32, Bound(1.8, 1.5), 1.8)):
        held = Goals({"inductor": bound, "eager": Bound(None, must_eager)}, Bound(0.90, 0.85))
        label = f"prefill {short_name(dtype)} T=S=2048 K=512"
        made.append(Case("lightning_indexer", label, partial(_prefill, dtype, 2048, 512), held))
    unscored = Goals(seconds=0.005)
    made.append(
        Case("lightning_indexer", "T=S=K=2048, nothing to score", partial(_prefill, bf16, 2048, 2048), unscored)
    )
    return made


def _tensors(dtype: torch.dtype, rows: int, positions: int) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(1, rows, _HEADS, _WIDTH).to(dtype)
    return query, torch.randn(1, positions, 1, _WIDTH).to(dtype), torch.randn(1, rows, _HEADS).to(dtype)


def _scores(query: Tensor, key: Tensor, weights: Tensor, hidden: Tensor | None) -> Tensor:
    """float32 [T, S] from operands as they are stored, -inf where `hidden` [T, S]."""
    blocks = []
    for start in range(0, query.shape[1], _CHUNK):
        rows = slice(start, start + _CHUNK)
        blocks.append(index_scores(query[:, rows].float(), key[:, :, 0].float(), weights[:, rows].float())[0])
    scores = torch.cat(blocks)
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _stored(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a baseline computes: that of the tensors where the machine multiplies in it."""
    return dtype if has_bf16_products() else torch.float32


def _decode(dtype: torch.dtype, rows: int, positions: int, count: int) -> Work:
    query, key, weights = _tensors(dtype, rows, positions)
    kind = _stored(dtype)

    def plain(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return index_scores(query, keys, weights.to(kind)).topk(count, dim=-1).indices

    def ours() -> Tensor:
        return torch.ops.k31.lightning_indexer(query, key, weights, sparse_count=count, sparse_mode=0)  # type: ignore[no-any-return]

    scores = _scores(query, key, weights, None)

    def check(result: Tensor, tolerance: float) -> str | None:
        return selection_differs(result.reshape(rows, -1), scores, count, tolerance)

    form = Form("", plain, lambda function: lambda: function(query, key[:, :, 0], weights))
    roof = Roof(_kind(dtype), 2.0 * rows * positions * _HEADS * _WIDTH)
    return Work(ours, [form], check, _OURS, _PLAIN, roof)


def _prefill(dtype: torch.dtype, rows: int, count: int) -> Work:
    query, key, weights = _tensors(dtype, rows, rows)
    kind = _stored(dtype)

    def chunk(query: Tensor, keys: Tensor, weights: Tensor, hidden: Tensor, kept: int) -> Tensor:
        scores = index_scores(query, keys, weights.to(kind)).masked_fill(hidden, -math.inf)
        return scores.topk(kept, dim=-1).indices

    future = torch.ones(rows, rows, dtype=torch.bool).triu(1)

    def bind(function: Callable[..., Any]) -> Thunk:
        def parts() -> Iterator[Tensor]:
            for start in range(0, rows, _CHUNK):
                end = min(start + _CHUNK, rows)
                part, seen = slice(start, end), slice(0, end)
                hidden = future[part, seen]
                yield function(query[:, part], key[:, seen, 0], weights[:, part], hidden, min(count, end))

        return lambda: list(parts())

    def ours() -> Tensor:
        return torch.ops.k31.lightning_indexer(query, key, weights, sparse_count=count)  # type: ignore[no-any-return]

    scores = _scores(query, key, weights, future)

    def check(result: Tensor | list[Tensor], tolerance: float) -> str | None:
        if isinstance(result, list):
            pads = ((part[0], (0, count - part.shape[-1])) for part in result)
            result = torch.cat([torch.nn.functional.pad(part, pad, value=-1) for part, pad in pads])
        return selection_differs(result.reshape(rows, -1), scores, count, tolerance)

    scored = sum(seen for seen in range(1, rows + 1) if seen > count)
    roof = Roof(_kind(dtype), 2.0 * scored * _HEADS * _WIDTH) if scored else None
    return Work(ours, [Form("in chunks", chunk, bind, dynamic=True)], check, _OURS, _PLAIN, roof)


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
