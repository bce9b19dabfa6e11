"""`grouped_experts`: 64 experts of 1024 x 512 in bfloat16, 8 a token, for few tokens and for many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from k31compile.bench.case import Case, Form, Roof, Thunk, Work
from k31compile.bench.compare import tensors_differ
from k31compile.bench.goals import Bound, Goals
from k31compile.bench.places import Places
from k31compile.model.config import K31Config
from k31compile.model.moe import Experts, situ

_EXPERTS, _CHOSEN, _WIDTH, _INNER = 64, 8, 1024, 512


def cases() -> list[Case]:
    """One token whose experts come from DRAM, 16 and 512."""
    made = []
    for tokens, bound, must_eager, roof in (
        (1, Bound(1.0, 0.9), 1.9, Bound()),
        (16, Bound(2.0, 1.6), 2.0, Bound()),
        (512, Bound(1.25, 1.1), 1.3, Bound(None, 0.75)),
    ):
        held = Goals({"inductor": bound, "eager": Bound(None, must_eager)}, roof)
        label = f"bf16 N={tokens} E={_EXPERTS} k={_CHOSEN} D={_WIDTH} I={_INNER}"
        make = partial(_make, tokens)
        made.append(Case("grouped_experts", label, make, held, "grouped_experts bf16", tokens, tokens == 1))
    return made


def _make(tokens: int) -> Work:
    few = tokens == 1
    distinct = _CHOSEN if few else _EXPERTS  # so that each walk of one token meets the same values elsewhere in memory
    gate_up = (torch.randn(distinct, 2 * _INNER, _WIDTH) * _WIDTH**-0.5).bfloat16().repeat(_EXPERTS // distinct, 1, 1)
    down = (torch.randn(distinct, _WIDTH, _INNER) * _INNER**-0.5).bfloat16().repeat(_EXPERTS // distinct, 1, 1)
    x, weights = torch.randn(tokens, _WIDTH).bfloat16(), torch.rand(tokens, _CHOSEN)
    if few:
        indices = [torch.arange(start, start + _CHOSEN)[None] for start in range(0, _EXPERTS, _CHOSEN)]
    else:
        indices = [torch.stack([torch.randperm(_EXPERTS)[:_CHOSEN] for _ in range(tokens)])]
    places = Places(indices)
    gate, up = gate_up.split(_INNER, dim=1)

    def layer(form: str) -> Experts:
        config = K31Config(
            num_experts=_EXPERTS, num_experts_per_token=_CHOSEN, routed_expert_hidden_size=_WIDTH,
            moe_intermediate_size=_INNER, moe_form=form,
        )  # fmt: skip
        made = Experts(config)
        made.gate_up_proj.data, made.down_proj.data = gate_up, down
        return made

    def bind(function: Callable[..., Any]) -> Thunk:
        chosen = places.walk()
        return lambda: function(x, next(chosen), weights)

    def ours(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.k31.grouped_experts(x, index, weights, [gate], [up], [down])  # type: ignore[no-any-return]

    grouped = partial(_grouped_product, gate_up, down)
    forms = [Form("grouped product", grouped, bind)]
    if few:
        forms.append(Form("gathered weights", layer("gather"), bind))
    else:
        forms.append(Form("one product an expert", layer("grouped"), bind, opponents=("eager",)))
    expected = _exact(x, indices[0], weights, gate_up, down)

    def check(result: Tensor, tolerance: float) -> str | None:
        return tensors_differ(result, expected, tolerance)

    roof = Roof("bfloat16", 2.0 * tokens * _CHOSEN * 3 * _WIDTH * _INNER) if tokens == 512 else None
    return Work(bind(ours), forms, check, 1e-2, 3e-2, roof, calls=1 if few else None)


def _grouped_product(gate_up: Tensor, down: Tensor, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """torch's own product of groups of rows, after sorting the pairs of token and expert by expert."""
    order = index.flatten().argsort(stable=True)
    tokens = order // index.shape[1]
    ends = index.flatten().bincount(minlength=_EXPERTS).cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(x[tokens], gate_up.mT, offs=ends).chunk(2, dim=-1)
    out = torch._grouped_mm(situ(gate, up, 4.0, 25.0), down.mT, offs=ends)
    weighted = out.to(weights.dtype) * weights.flatten()[order, None]
    return weights.new_zeros(x.shape).index_add(0, tokens, weighted)


def _exact(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """float32 [N, D], one expert after the other."""
    result = torch.zeros(x.shape)
    for expert in range(_EXPERTS):
        tokens, slots = torch.nonzero(index == expert, as_tuple=True)
        gate, up = (x[tokens].float() @ gate_up[expert].float().T).chunk(2, dim=-1)
        out = situ(gate, up, 4.0, 25.0) @ down[expert].float().T
        result.index_add_(0, tokens, out * weights[tokens, slots, None])
    return result
