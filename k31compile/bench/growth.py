"""How a decode step grows with its history beyond what must grow: the indexers, which score every key."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k31compile.bench.case import Thunk
from k31compile.bench.rows import Row, in_short
from k31compile.model import K31Config

SHORT, LONG = 4096, 65536
_MOST = 1.5  # times as long may a step behind LONG tokens take as one behind SHORT, the indexers left out


def indexers(config: K31Config, dtype: torch.dtype, batch: int, history: int) -> Thunk:
    """One call of every indexer of a step, each with keys of its own."""
    layers = sum(map(config.has_indexer, range(config.num_hidden_layers)))
    heads, width = config.index_n_heads, config.index_head_dim
    query, weights = torch.randn(batch, 1, heads, width).to(dtype), torch.randn(batch, 1, heads)
    keys = [torch.randn(batch, history, 1, width).to(dtype) for _ in range(layers)]
    count = min(config.index_topk, history)

    def call() -> list[torch.Tensor]:
        score = torch.ops.k31.lightning_indexer
        return [score(query, key, weights, sparse_count=count, sparse_mode=0) for key in keys]

    return call


def judge_growth(rows: Sequence[Row]) -> None:
    """Note in the rows of LONG histories how much longer they take than SHORT ones, without the indexers' part."""
    short = {row.series: row for row in rows if row.size == SHORT and _rest(row) is not None}
    for row in rows:
        before = short.get(row.series)
        rest = _rest(row)
        if row.size != LONG or before is None or rest is None:
            continue
        growth = rest / (_rest(before) or rest)
        row.details["growth"], row.details["growth_limit"] = in_short(growth), _MOST
        row.growth_verdict = "goal" if growth < _MOST else "below"


def _rest(row: Row) -> float | None:
    """Seconds of one call of ours without the part that must grow; None where either is not known."""
    part = row.details.get("part_seconds")
    return None if part is None or row.seconds is None else max(row.seconds - part, 0.0)
