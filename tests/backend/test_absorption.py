"""Whoever caches the latent gets absorbed attention, whoever caches heads keeps them: numbers against float64."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from k31compile.report import last_report

OPS = {"codegen": "ops"}
B, S, HIDDEN, RANK, HEADS, NOPE, ROPE, LATENT, V = 2, 44, 26, 18, 3, 10, 6, 14, 9
INDEX_HEADS, INDEX, K = 4, 12, 5
NAMED = {"indexer_prolog": 1, "lightning_indexer": 1, "sparse_flash_attention": 1, "static_top_k": 1}


class Attention(nn.Module):
    """An indexer and heads of their own in the arithmetic; what is kept between steps is up to the subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_norm = nn.Linear(HIDDEN, RANK, bias=False), nn.RMSNorm(RANK)
        self.q_up = nn.Linear(RANK, HEADS * (NOPE + ROPE), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(HIDDEN, LATENT + ROPE, bias=False), nn.RMSNorm(LATENT)
        self.kv_up = nn.Linear(LATENT, HEADS * (NOPE + V), bias=False)
        self.index_q, self.index_k = nn.Linear(RANK, INDEX_HEADS * INDEX), nn.Linear(HIDDEN, INDEX)
        self.index_w, self.k_norm = nn.Linear(HIDDEN, INDEX_HEADS), nn.LayerNorm(INDEX)
        self.register_buffer("index_keys", torch.zeros(B, S, INDEX))

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        place = start[:, None] + torch.arange(length)
        row = torch.arange(batch)[:, None]
        low = self.q_norm(self.q_down(x))
        q = self.q_up(low).view(batch, length, HEADS, NOPE + ROPE)
        self.index_keys[row, place] = self.k_norm(self.index_k(x))
        dots = torch.einsum(
            "bthd,bsd->bths", self.index_q(low).view(batch, length, INDEX_HEADS, INDEX), self.index_keys
        )
        scores = (dots.relu() * self.index_w(x).unsqueeze(-1)).sum(2)
        hidden = torch.arange(S) > place[..., None]
        chosen = scores.masked_fill(hidden, -torch.inf).topk(K, -1).indices
        seen = torch.zeros_like(hidden).scatter(-1, chosen, True) & ~hidden
        latent, turned = self.kv_down(x).split([LATENT, ROPE], -1)
        key, value = self.heads(self.kv_norm(latent), turned, row, place)
        logits = torch.einsum("bthd,bshd->bhts", q, key) * (NOPE + ROPE) ** -0.5
        weights = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("bhts,bshv->bthv", weights, value)

    def heads(self, latent: torch.Tensor, turned: torch.Tensor, *at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def expanded(self, latent: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of every head of every row."""
        batch, rows, _ = latent.shape
        both = self.kv_up(latent).view(batch, rows, HEADS, NOPE + V)
        key = torch.cat([both[..., :NOPE], turned[:, :, None].expand(-1, -1, HEADS, -1)], -1)
        return key, both[..., NOPE:]


class CachesTheLatent(Attention):
    """One cache [B, S, latent + rope]; all of it is expanded at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(B, S, LATENT + ROPE))

    def heads(self, latent: torch.Tensor, turned: torch.Tensor, *at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache[at] = torch.cat([latent, turned], -1)
        return self.expanded(self.cache[..., :LATENT], self.cache[..., LATENT:])


class CachesTwo(Attention):
    """The latent and what is rotated in caches of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("latents", torch.zeros(B, S, LATENT))
        self.register_buffer("ropes", torch.zeros(B, S, ROPE))

    def heads(self, latent: torch.Tensor, turned: torch.Tensor, *at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.latents[at] = latent
        self.ropes[at] = turned
        return self.expanded(self.latents, self.ropes)


class CachesHeads(Attention):
    """The keys and values of every head, expanded once, for the new rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(B, S, HEADS, NOPE + ROPE))
        self.register_buffer("values", torch.zeros(B, S, HEADS, V))

    def heads(self, latent: torch.Tensor, turned: torch.Tensor, *at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[at], self.values[at] = self.expanded(latent, turned)
        return self.keys, self.values


def made(kind: type[Attention]) -> Attention:
    torch.manual_seed(3)
    return kind().requires_grad_(False).eval()


def check_steps(kind: type[Attention], eager: Any, lengths: tuple[int, ...]) -> None:
    """A prompt and steps, each against float64, and what is in the caches at the end."""
    exact, model = made(kind).double(), made(kind)
    compiled = torch.compile(model, backend="k31", options=OPS, dynamic=False)
    start = torch.tensor([0, 3])
    for i, length in enumerate(lengths):
        x = torch.randn(B, length, HIDDEN, generator=torch.Generator().manual_seed(i))
        with torch.no_grad(), eager():
            want = exact(x.double(), start)
        with torch.no_grad():
            got = compiled(x, start)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        start = start + length
    for (name, mine), theirs in zip(model.named_buffers(), exact.buffers(), strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name


def heads_of_all_rows(graph: Any) -> list[str]:
    """Values with a row for each place of the cache and for each head, as expanding the cache makes them."""
    return [
        node.name
        for node in graph.graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
        if {S, HEADS} <= set(node.meta["val"].shape)
    ]


@pytest.mark.parametrize("kind", [CachesTheLatent, CachesTwo])
def test_who_caches_the_latent_is_absorbed(kind: type[Attention], eager: Any, rewritten: Any, fused: Any) -> None:
    check_steps(kind, eager, (13, 1, 1, 1))
    assert fused() == [NAMED | {"mla_prolog": 1}] * 2
    for graph in rewritten:
        assert heads_of_all_rows(graph) == []
        (attention,) = (n for n in graph.graph.nodes if str(n.target) == "k31.sparse_flash_attention.default")
        # one key for all heads, as wide as the latent; queries of that width too
        assert attention.args[1].meta["val"].shape[2] == 1
        assert attention.args[0].meta["val"].shape[3] in (LATENT, LATENT + ROPE)
    (region,) = (r for r in last_report().regions if r["name"] == "mla_prolog")
    assert {"q_down", "q_up", "absorb", "kv_down", "latent_write"} <= {part["name"] for part in region["parts"]}


def test_who_caches_heads_keeps_them(eager: Any, rewritten: Any, fused: Any) -> None:
    check_steps(CachesHeads, eager, (13, 1, 1, 1))
    assert fused() == [NAMED] * 2
    for graph in rewritten:
        (attention,) = (n for n in graph.graph.nodes if str(n.target) == "k31.sparse_flash_attention.default")
        assert attention.args[1].meta["val"].shape[2:] == (HEADS, NOPE + ROPE)
        products = [n for n in graph.graph.nodes if str(n.target) == "aten.linear.default"]
        # heads are made of the new rows alone
        assert all(S not in node.meta["val"].shape for node in products)
    assert [region["name"] for region in last_report().regions] == ["indexer_prolog"]
    assert not last_report().refused


def test_the_test_sees_heads_that_are_expanded(eager: Any, rewritten: Any) -> None:
    model = copy.deepcopy(made(CachesTwo))
    options = {**OPS, "fuse": ["lightning_indexer"]}
    with torch.no_grad():
        torch.compile(model, backend="k31", options=options, dynamic=False)(
            torch.randn(B, 1, HIDDEN), torch.tensor([4, 7])
        )
    assert heads_of_all_rows(rewritten[0])
