"""`sparse_flash_attention`: latent rows of 512 and 64, 2048 of them a query, against gathering them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from k31compile.bench.case import Case, Form, Roof, Work
from k31compile.bench.compare import tensors_differ
from k31compile.bench.dtypes import has_bf16_products
from k31compile.bench.goals import Bound, Goals
from k31compile.model.sparse_attention import attend_gathered

_LATENT, _ROPE, _COUNT, _SCALE = 512, 64, 2048, 0.05


def cases() -> list[Case]:
    """One query with few and with many heads, and a block of queries."""
    made = []
    for rows, heads, positions, bound, must_eager, roof in (
        (1, 16, 16384, Bound(3.0, 2.2), 3.0, 0.65),
        (1, 64, 16384, Bound(2.0, 1.7), 2.0, 0.80),
        (128, 16, 4096, Bound(2.8, 2.2), 3.0, 0.75),
    ):
        held = Goals({"inductor": bound, "eager": Bound(None, must_eager)}, Bound(roof))
        label = f"bf16 T={rows} H={heads} S={positions} K={_COUNT}"
        make = partial(_make, rows, heads, positions)
        made.append(Case("sparse_flash_attention", label, make, held, is_quick=rows == 1))
    return made


def _make(rows: int, heads: int, positions: int) -> Work:
    cache = torch.randn(1, positions, 1, _LATENT + _ROPE).bfloat16()
    query = torch.randn(1, rows, heads, _LATENT + _ROPE).bfloat16()
    lists = [torch.randperm(positions)[:_COUNT].sort().values for _ in range(rows)]
    indices = torch.stack(lists).view(1, rows, 1, _COUNT).to(torch.int32)
    latent, rope = cache[..., :_LATENT], cache[..., _LATENT:]
    kind = torch.bfloat16 if has_bf16_products() else torch.float32

    def plain(query: Tensor, cache: Tensor, indices: Tensor) -> Tensor:
        picked = cache[0, :, 0][indices[0, :, 0].long()].to(kind)
        logits = torch.einsum("thd,tkd->thk", query[0].to(kind), picked) * _SCALE
        weights = torch.softmax(logits, -1, dtype=torch.float32).to(kind)
        return torch.einsum("thk,tkd->thd", weights, picked[..., :_LATENT])

    def ours() -> Tensor:
        return torch.ops.k31.sparse_flash_attention(  # type: ignore[no-any-return]
            query[..., :_LATENT], latent, latent, indices, _SCALE, query_rope=query[..., _LATENT:], key_rope=rope,
            sparse_mode=0,
        )  # fmt: skip

    expected = torch.cat([_exact(query[:, row : row + 1], cache, indices[:, row : row + 1]) for row in range(rows)], 1)
    form = Form("", plain, lambda function: lambda: function(query, cache, indices))
    roof = Roof("bfloat16", 2.0 * rows * _COUNT * heads * (2 * _LATENT + _ROPE))
    return Work(ours, [form], partial(_differs, expected), 5e-3, 4e-2, roof)


def _differs(expected: Tensor, result: Tensor, tolerance: float) -> str | None:
    return tensors_differ(result, expected, tolerance)


def _exact(query: Tensor, cache: Tensor, indices: Tensor) -> Tensor:
    """The model's own form in float32, for one query row."""
    picked = cache[0, :, 0][indices[0, :, 0].long()][None].float()
    seen = torch.ones(picked.shape[:3], dtype=torch.bool)
    split = (_LATENT, _ROPE)
    (q_latent, q_rope), (latent, rope) = (x.split(split, dim=-1) for x in (query.float(), picked))
    return attend_gathered(q_latent, q_rope, latent, rope, seen, _SCALE)
