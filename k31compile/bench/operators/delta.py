"""`kda_recurrent` with states from DRAM, and `kda_chunk` for prompts: heads of 128 x 128, float32."""

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
from k31compile.model.delta_rule import kda_chunk, kda_recurrent

_WIDTH = 128
_STATE_BYTES = 4 * _WIDTH * _WIDTH  # of one head
_ROTATED = 320 << 20
_FLOPS = 8.0 * _WIDTH * _WIDTH  # of one token and head: decay, predict, write and read


def cases() -> list[Case]:
    """One token of one and of eight requests; prompts of 1k, 4k and 16k tokens."""
    made = []
    for batch, bound, must_eager, roof in (
        (1, Bound(3.5, 2.4), 4.5, Bound(0.80)),
        (8, Bound(5.0, 4.0), 10.0, Bound(0.95, 0.80)),
    ):
        held = Goals({"inductor": bound, "eager": Bound(None, must_eager)}, roof)
        label = f"decode fp32 B={batch} H=96, states from DRAM"
        made.append(Case("kda_recurrent", label, partial(_decode, batch, 96), held, is_quick=batch == 1))
    for length in (1024, 4096, 16384):
        # Inductor unrolls the loop over chunks: beyond 1k its compile takes minutes, so the torch form is the measure
        bounds = (
            {"inductor": Bound(2.4, 1.8), "eager": Bound(None, 1.9)} if length == 1024 else {"eager": Bound(2.5, 1.9)}
        )
        held = Goals(bounds, Bound(0.65))
        label = f"prefill fp32 T={length} H=8"
        make = partial(_prefill, length, 8)
        made.append(Case("kda_chunk", label, make, held, "kda_chunk prefill fp32 H=8", length))
    return made


def _tensors(batch: int, rows: int, heads: int) -> tuple[Tensor, ...]:
    """query, key, value [B, T, H, 128], gate (log decays of at most 1), beta [B, T, H]."""
    shape = (batch, rows, heads, _WIDTH)
    query, key = (torch.nn.functional.normalize(torch.randn(shape), dim=-1) for _ in range(2))
    return query, key, torch.randn(shape), -torch.rand(shape), torch.rand(shape[:3])


def by_products(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule for one token by elementwise products and sums, which Inductor fuses where it leaves einsum a call."""
    q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g, beta))
    state = g.exp().unsqueeze(-1) * state
    predicted = (state * k.unsqueeze(-1)).sum(-2)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - predicted)).unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2).unsqueeze(1), state


def _decode(batch: int, heads: int) -> Work:
    arguments = _tensors(batch, 1, heads)
    size = batch * heads * _STATE_BYTES
    first = torch.randn(batch, heads, _WIDTH, _WIDTH)
    count = -(-_ROTATED // size) + 1
    places = Places([first.clone() for _ in range(count)])
    # Ours in places of their own: what it writes in place is no other's state.
    own = Places([first.clone() for _ in range(count)]).walk()

    def in_place() -> tuple[Tensor, Tensor]:
        state = next(own)
        return torch.ops.k31.kda_recurrent_(*arguments, state), state

    def bind(function: Callable[..., Any]) -> Thunk:
        states = places.walk()
        return lambda: function(*arguments, next(states))

    query, key, value, gate, beta = (x.double() for x in arguments)
    expected = kda_recurrent(query, key, value, gate, beta, first.double())
    forms = [Form("einsum", kda_recurrent, bind), Form("products and sums", by_products, bind)]
    # one call a sample: the variants must walk at one pace, or they would meet in the cache
    return Work(
        in_place, forms, partial(_differs, expected), 1e-5, 1e-5,
        Roof("in place", 2.0 * size), calls=1,
    )  # fmt: skip


def _prefill(length: int, heads: int) -> Work:
    arguments = _tensors(1, length, heads)
    state = torch.randn(1, heads, _WIDTH, _WIDTH)

    def bind(function: Callable[..., Any]) -> Thunk:
        return lambda: function(*arguments, state)

    def chunks(size: int) -> Callable[..., Any]:
        return partial(kda_chunk, chunk=size, anchored=True)

    query, key, value, gate, beta = (x.double() for x in arguments)
    expected = kda_recurrent(query, key, value, gate, beta, state.double())
    forms = [Form("chunks of 16", chunks(16), bind, opponents=("eager",))]
    forms.append(Form("chunks of 64", chunks(64), bind, opponents=() if length == 1024 else ("eager",)))
    roof = Roof("float32", _FLOPS * length * heads)
    return Work(bind(torch.ops.k31.kda_chunk), forms, partial(_differs, expected), 1e-4, 1e-3, roof)


def _differs(expected: Any, result: Any, tolerance: float) -> str | None:
    return tensors_differ(result, expected, tolerance)
