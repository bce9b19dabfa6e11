"""A latent attention behind an indexer, written as different authors would: each choice is an option of one layer."""

import math

import torch
from captured import sketch
from torch import nn
from torch.func import functional_call

from k31compile.options import Options
from k31compile.passes.pipeline import run_pipeline

B, T, S, K, HIDDEN, RANK = 2, 3, 37, 5, 26, 18
HEADS, NOPE, ROPE, LATENT, V = 3, 10, 4, 14, 9
INDEX_HEADS, INDEX, PAGE = 4, 16, 4
INF = float("inf")


def turn_halves(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def turn_pairs(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def turn_complex(x, cos, sin):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.complex(cos.float(), sin.float())).flatten(-2).to(x.dtype)


def butterfly(x):
    half = 1
    while half < x.shape[-1]:
        a, b = x.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        x, half = torch.stack([a + b, a - b], dim=-2).flatten(-3), half * 2
    return x / math.sqrt(x.shape[-1])


def norm_by_hand(x, weight, bias):
    x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight + bias


def write_index_put(cache, place, rows):
    cache[torch.arange(B)[:, None], place] = rows


def write_index_copy(cache, place, rows):
    cache.index_copy_(1, place[0], rows)


def write_slice(cache, place, rows):
    cache[:, 7 : 7 + T] = rows


def write_scatter(cache, place, rows):
    cache.scatter_(1, place[..., None].expand_as(rows), rows)


WRITES = {fn.__name__[6:]: fn for fn in (write_index_put, write_index_copy, write_slice, write_scatter)}
TURNS = {"halves": turn_halves, "pairs": turn_pairs, "complex": turn_complex}


class Layer(nn.Module):
    """One layer; `packed` names what comes out of one product: "", "down", "index", "all"."""

    def __init__(
        self, packed="", turn="halves", write="index_put", norm="layer_norm", low_rank=True, joint=False, native=False,
        hadamard="", rope=True, index_rope=True,
    ):  # fmt: skip
        super().__init__()
        self.packed, self.write, self.norm, self.low_rank, self.joint = packed, write, norm, low_rank, joint
        self.native, self.hadamard, self.index_rope = native, hadamard, index_rope
        self.turn, self.rope = TURNS[turn], ROPE if rope else 0
        sizes = {"q": RANK if low_rank else HEADS * (NOPE + self.rope), "kv": LATENT + self.rope}
        sizes |= {"key": INDEX, "weights": INDEX_HEADS}
        groups = {"": [], "down": ["q kv"], "index": ["key weights"], "all": ["q kv key weights"]}[packed]
        groups += [name for name in sizes if not any(name in group.split() for group in groups)]
        self.groups = [group.split() for group in groups]
        self.sizes = sizes
        self.down = nn.ModuleList(nn.Linear(HIDDEN, sum(sizes[n] for n in g), bias=False) for g in self.groups)
        self.q_norm, self.kv_norm = nn.RMSNorm(RANK), nn.RMSNorm(LATENT)
        self.up = nn.Linear(RANK, HEADS * (NOPE + self.rope), bias=False)
        self.index_up = nn.Linear(RANK if low_rank else HIDDEN, INDEX_HEADS * INDEX, bias=False)
        self.k_norm = nn.LayerNorm(INDEX)
        self.kv_up = nn.Parameter(torch.randn(HEADS, NOPE + V, LATENT) * 0.2)
        matrix = torch.tensor([[1.0]])
        for _ in range(4):
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        self.register_buffer("matrix", matrix / 4)
        for name, width in (("latents", LATENT), ("ropes", self.rope), ("rows", LATENT + self.rope), ("keys", INDEX)):
            self.register_buffer(name, torch.randn(B, S, width) * 0.5)

    def forward(self, x, start):
        place = start[:, None] + torch.arange(T)
        q, kv, key, weights = self._projected(x)
        low = self.q_norm(q) if self.low_rank else x
        q = (self.up(low) if self.low_rank else q).view(B, T, HEADS, NOPE + self.rope)
        angle = place[..., None] * torch.tensor([1.0, 0.3])
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        chosen = self._select(low, key, weights, place, cos, sin)
        latent, turned = self.kv_norm(kv[..., :LATENT]), kv[..., LATENT:]
        nope, q_rope = q[..., :NOPE], q[..., NOPE:]
        if self.rope:
            turned, q_rope = self.turn(turned, cos, sin), self.turn(q_rope, cos[:, :, None], sin[:, :, None])
        return self._attend(nope, q_rope, *self._cached(latent, turned, place), chosen, place)

    def _projected(self, x):
        found = {}
        for group, linear in zip(self.groups, self.down, strict=True):
            found |= zip(group, linear(x).split([self.sizes[name] for name in group], -1), strict=True)
        return [found[name] for name in ("q", "kv", "key", "weights")]

    def _select(self, low, key, weights, place, cos, sin):
        q = self.index_up(low).view(B, T, INDEX_HEADS, INDEX)
        if self.norm == "by_hand":
            key = norm_by_hand(key, self.k_norm.weight, self.k_norm.bias)
        elif self.norm:
            key = self.k_norm(key)
        if self.index_rope:
            q = torch.cat([self.turn(q[..., :ROPE], cos[:, :, None], sin[:, :, None]), q[..., ROPE:]], -1)
            key = torch.cat([self.turn(key[..., :ROPE], cos, sin), key[..., ROPE:]], -1)
        if self.hadamard:
            q, key = (butterfly(v) if self.hadamard == "butterfly" else v @ self.matrix for v in (q, key))
        keys = self._written("keys", key, place)
        wide = torch.promote_types(q.dtype, torch.float32)
        dots = torch.einsum("bthd,bsd->bths", q.to(wide), keys.to(wide)).relu()
        scores = (dots * (weights.to(wide) * INDEX_HEADS**-0.5).unsqueeze(-1)).sum(2)
        hidden = torch.arange(keys.shape[1]) > place[..., None]
        return scores.masked_fill(hidden, -INF).topk(K, dim=-1).indices

    def _written(self, name, rows, place):
        cache = getattr(self, name)
        if self.write == "cat":
            return torch.cat([cache, rows], 1)
        if self.write == "none":
            return rows
        WRITES[self.write](cache, place, rows)
        return cache

    def _cached(self, latent, turned, place):
        if self.joint:
            rows = self._written("rows", torch.cat([latent, turned], -1), place)
            return rows[..., :LATENT], rows[..., LATENT:]
        return self._written("latents", latent, place), self._written("ropes", turned, place) if self.rope else None

    def _attend(self, nope, q_rope, latents, ropes, chosen, place):
        seen = torch.zeros(B, T, latents.shape[1], dtype=torch.bool).scatter(-1, chosen, True)
        seen = seen & (torch.arange(latents.shape[1]) <= place[..., None])
        if self.native:
            heads = torch.einsum("bsl,hdl->bshd", latents, self.kv_up)
            logits = torch.einsum("bthd,bshd->bhts", nope, heads[..., :NOPE])
        else:
            logits = torch.einsum("bthl,bsl->bhts", torch.einsum("bthn,hnl->bthl", nope, self.kv_up[:, :NOPE]), latents)
        if self.rope:
            logits = logits + torch.einsum("bthr,bsr->bhts", q_rope, ropes)
        weights = (logits * 0.3).masked_fill(~seen[:, None], -INF).softmax(-1)
        if self.native:
            return torch.einsum("bhts,bshv->bthv", weights, heads[..., NOPE:])
        return torch.einsum("bthl,hvl->bthv", torch.einsum("bhts,bsl->bthl", weights, latents), self.kv_up[:, NOPE:])


def traced(model, dtype=torch.float32):
    """The functional graph of a layer, its parameters known as such, without Dynamo."""
    model = model.to(dtype)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    state = {name: value.detach().requires_grad_(False) if name in dict(model.named_buffers()) else
             nn.Parameter(value.detach(), requires_grad=False) for name, value in state.items()}  # fmt: skip
    x, start = torch.randn(B, T, HIDDEN, dtype=dtype), torch.tensor([9, 20])

    def program(x, start, *values):
        return functional_call(model, dict(zip(state, values, strict=True)), (x, start))

    return sketch(program, x, start, *state.values()).module


def named(model, options=None, dtype=torch.float32):
    """The graph after all passes, and what each pass did."""
    return run_pipeline(traced(model, dtype), options or Options(), "cpu")


def made(seed=0, **options):
    torch.manual_seed(seed)
    return Layer(**options).requires_grad_(False).eval()
