"""Drawn calls of the two k31::attn_res phases."""

import torch

EPS = 1e-5


def draw(tokens=2, blocks=3, queries=5, width=7, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bank = torch.randn(tokens, blocks, width, generator=generator) * torch.arange(1, blocks + 1)[:, None]
    queries = torch.randn(queries, width, generator=generator) * 2 / width**0.5
    return {"bank": bank.to(dtype), "queries": queries, "eps": EPS}


def draw_update(tokens=2, width=7, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "partial": normal(tokens, width).to(dtype),
        "delta": normal(tokens, width).to(dtype),
        "maximum": normal(tokens),
        "total": normal(tokens).exp() + 1,
        "mixture": normal(tokens, width) * 2,
        "query": normal(width) * 2 / width**0.5,
        "eps": EPS,
    }


def assert_near(got, want, bound=5e-6):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)
