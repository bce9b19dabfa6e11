"""Weights that are no parameters: functions over matrices handed in, and a cache that is read by two slices.

Found with ten whole models, each written in another author's manner (a modeling file, an inference script, a tutorial,
einsum over named axes, small helpers, a serving engine's runner, naive references, builders, closures over lists,
sequence first) before the recognisers were read. No number was wrong and no graph broke that plain Dynamo keeps whole.
Blind, the delta rule and the indexer of the functions below were not fused, because `x @ w.T` with a plain `w` read as
a product of two activations, nor was the script's decode, whose cache was long beside its history: two equal slices of
it were two operands.
"""

import torch
import torch.nn.functional as F
from stranger import Stranger, seen_choice
from torch import nn


# 1. A research function: KDA over matrices, one einsum a projection, a convolution by unfold, state in and out.
def kda(x, w, state, wrong=""):
    batch, length, width = x.shape
    x = F.rms_norm(x, (width,), eps=1e-5)
    q, k, v = (
        F.silu(torch.einsum("btcw,cw->btc", F.pad(torch.einsum("btd,cd->btc", x, m), (0, 0, 3, 0)).unfold(1, 4, 1), c))
        for m, c in zip(w["qkv"], w["conv"], strict=True)
    )
    q, k, v = (a.reshape(batch, length, 3, -1) for a in (q, k, v))
    q, k = (a * torch.rsqrt((a * a).sum(-1, keepdim=True) + 1e-6) for a in (q, k))
    raw = torch.einsum("btr,hkr->bthk", x @ w["fa"].T, w["fb"])
    g = -5.0 * torch.sigmoid(w["a"].exp()[:, None] * (raw + w["dt"]))
    beta = torch.sigmoid(x @ (w["fa"][:3] if wrong == "beta" else w["b"]).T)
    outputs = []
    for t in range(length):
        before = state
        state = state * g[:, t, :, :, None].exp()
        read = torch.einsum("bhkv,bhk->bhv", before if wrong == "order" else state, k[:, t])
        state = state + torch.einsum("bhk,bh,bhv->bhkv", k[:, t], beta[:, t], v[:, t] - read)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] * q.shape[-1] ** -0.5))
    return torch.stack(outputs, 1), state


def kda_arguments(length=7, dim=20, heads=3, key=6, value=10):
    shapes = [heads * key, heads * key, heads * value]
    weights = {
        "qkv": [torch.randn(n, dim) / 4 for n in shapes],
        "conv": [torch.randn(n, 4) / 2 for n in shapes],
        "fa": torch.randn(5, dim) / 4,
        "fb": torch.randn(heads, key, 5) / 2,
        "a": torch.rand(heads),
        "dt": torch.randn(heads, key),
        "b": torch.randn(heads, dim) / 4,
    }
    return torch.randn(2, length, dim), weights, torch.randn(2, heads, key, value)


# 2. The same author's indexer: every matrix an argument.
def indexer(x, w, wrong=""):
    x = F.rms_norm(x, x.shape[-1:], eps=1e-5)
    q = torch.einsum("btr,hdr->bthd", x @ w["down"].T, w["q"])
    k = F.layer_norm(x @ w["k"].T, (w["k"].shape[0],), w["scale"], w["shift"], 1e-6)
    weights = (x @ w["w"].T) * q.shape[2] ** -0.5
    dots = torch.einsum("bthd,bsd->bths", q, k)
    dots = dots if wrong == "linear" else F.relu(dots)
    scores = torch.einsum("bths,bth->bts", dots, weights.abs() if wrong == "weights" else weights)
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).topk(4, dim=-1).indices


def indexer_arguments(dim=20, heads=7, width=9):
    weights = {
        "down": torch.randn(11, dim) / 4,
        "q": torch.randn(heads, width, 11) / 3,
        "k": torch.randn(width, dim) / 4,
        "scale": torch.rand(width) + 0.5,
        "shift": torch.randn(width),
        "w": torch.randn(heads, dim) / 4,
    }
    return torch.randn(2, 13, dim), weights


# 3. An inference script's decode: buffers longer than the history, and each read by a slice of its own.
class ScriptDecode(nn.Module):
    def __init__(self, wrong="", dim=24, n_heads=3, kv_lora=14, rope=4, v_dim=6):
        super().__init__()
        self.wrong, self.n_heads, self.kv_lora, self.rope, self.v_dim = wrong, n_heads, kv_lora, rope, v_dim
        self.wq = nn.Linear(dim, n_heads * (8 + rope), bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora + rope, bias=False)
        self.kv_norm = nn.RMSNorm(kv_lora, eps=1e-6)
        self.wkv_b = nn.Linear(kv_lora, n_heads * (8 + v_dim), bias=False)
        self.softmax_scale = (8 + rope) ** -0.5
        self.register_buffer("kv_cache", torch.randn(2, 64, kv_lora))
        self.register_buffer("pe_cache", torch.randn(2, 64, rope))

    def forward(self, x, topk_indices, end_pos=13):
        q_nope, q_pe = self.wq(x).unflatten(-1, (self.n_heads, -1)).split([8, self.rope], dim=-1)
        kv, k_pe = self.wkv_a(x).split([self.kv_lora, self.rope], dim=-1)
        self.kv_cache[:2, end_pos - 1 : end_pos] = self.kv_norm(kv)
        self.pe_cache[:2, end_pos - 1 : end_pos] = k_pe
        wkv_b = self.wkv_b.weight.view(self.n_heads, -1, self.kv_lora)
        q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, :8])
        scores = torch.einsum("bshc,btc->bsht", q_nope, self.kv_cache[:2, :end_pos])
        scores = (scores + torch.einsum("bshr,btr->bsht", q_pe, self.pe_cache[:2, :end_pos])) * self.softmax_scale
        mask = torch.full((2, 1, end_pos), float("-inf")).scatter_(-1, topk_indices, 0)
        weights = (scores + mask.unsqueeze(2)).softmax(dim=-1)
        # The lie: what a token reads is one token late.
        late = slice(1, end_pos + 1) if self.wrong == "late" else slice(0, end_pos)
        values = torch.einsum("bsht,btc->bshc", weights, self.kv_cache[:2, late])
        return torch.einsum("bshc,hdc->bshd", values, wkv_b[:, -self.v_dim :])


def script_arguments():
    return torch.randn(2, 1, 24), torch.rand(2, 1, 13).topk(5).indices


def _with(function, arguments, wrong=""):
    """What is compiled closes over its matrices."""
    x, weights, *state = arguments()
    return lambda x, *state: function(x, weights, *state, wrong=wrong), (x, *state)


STRANGERS = [
    Stranger("matrices_kda", lambda: _with(kda, kda_arguments), {"kda_recurrent": 1}),
    Stranger(
        "matrices_indexer", lambda: _with(indexer, indexer_arguments), {"lightning_indexer": 1}, meaning=seen_choice
    ),
    Stranger("script_decode", lambda: (ScriptDecode(), script_arguments()), {"sparse_flash_attention": 1}),
]

BUGS = [
    Stranger("WrongMatricesKda: order", lambda: _with(kda, kda_arguments, "order"), {}),
    Stranger("WrongMatricesKda: beta", lambda: _with(kda, kda_arguments, "beta"), {}),
    Stranger(
        "WrongIndexerOfMatrices: linear", lambda: _with(indexer, indexer_arguments, "linear"), {}, meaning=seen_choice
    ),
    Stranger(
        "WrongIndexerOfMatrices: weights", lambda: _with(indexer, indexer_arguments, "weights"), {}, meaning=seen_choice
    ),
    Stranger("WrongScriptDecode: late", lambda: (ScriptDecode("late"), script_arguments()), {}),
]
