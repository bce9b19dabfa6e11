"""What pico can do, measured: bits per byte under several selections, recall of the indexer, load of the experts."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from k31compile.model import K31ForCausalLM
from pico_training.objectives import next_byte_loss, repetitions
from pico_training.trainer import forward
from pico_training.watch import (
    Select,
    random_selection,
    select_all,
    select_indexed,
    select_window,
    selecting,
    watched,
)

BATCH = 8
SELECTIONS: dict[str, Callable[[], Select]] = {
    "indexer": lambda: select_indexed,
    "dense": lambda: select_all,
    "random": lambda: random_selection(0),
    "last window": lambda: select_window,
}
"""Name -> what attention may read instead of the indexer's choice; k keys each, but for "dense"."""


@dataclass(frozen=True)
class Recall:
    """Share of one layer's attention, averaged over heads, that k keys hold, over tokens with more than k keys."""

    layer: int
    indexer: float
    oracle: float
    random: float
    window: float


@torch.no_grad()
def bits_per_byte(model: K31ForCausalLM, rows: Tensor, selection: str = "indexer") -> float:
    """Mean bits per byte of windows int64 [n, T + 1], each read from an empty cache."""
    total = 0.0
    for part in rows.split(BATCH):
        with selecting(model, SELECTIONS[selection]()):
            logits = forward(model, part[:, :-1].contiguous())
        total += next_byte_loss(logits, part[:, 1:]).item() * len(part)
    return total / len(rows) / math.log(2)


@torch.no_grad()
def measure_recall(model: K31ForCausalLM, rows: Tensor) -> list[Recall]:
    """How much of the dense attention's mass each way of selecting keeps, a Recall per MLA layer; "native" models."""
    sums: dict[int, Tensor] = {}
    k = model.config.index_topk
    for part in rows.split(BATCH):
        with watched(model) as seen, selecting(model, select_all):
            forward(model, part[:, :-1].contiguous())
        for number, (weights, scores) in enumerate(zip(seen.attention, seen.scores, strict=True)):
            mass = weights.mean(1)
            visible = torch.ones(mass.shape[1:], dtype=torch.bool).tril()
            chosen = scores.masked_fill(~visible, -math.inf).topk(k).indices
            window = (torch.arange(mass.shape[1])[:, None] - torch.arange(k)).clamp(min=0).expand_as(chosen)
            share = torch.tensor(k) / torch.arange(1, mass.shape[1] + 1)
            kept = [mass.gather(-1, chosen).sum(-1), mass.topk(k).values.sum(-1)]
            kept += [share.expand(mass.shape[:2]), mass.gather(-1, window).sum(-1)]
            sums[number] = sums.get(number, 0.0) + torch.stack([m[:, k:].mean(-1).sum() for m in kept])
    layers = model.config.full_attention_layers
    return [Recall(layers[number], *(total / len(rows)).tolist()) for number, total in sums.items()]


@torch.no_grad()
def measure_lookup(model: K31ForCausalLM, rows: Tensor) -> dict[str, list[float]]:
    """Weight that each head gives to earlier occurrences, averaged over tokens that have one: layer -> per head."""
    found = {}
    with watched(model) as seen, selecting(model, select_all):
        forward(model, rows[:, :-1].contiguous())
    repeated = repetitions(rows[:, :-1])
    where = repeated.any(-1)
    for layer, weights in zip(model.config.full_attention_layers, seen.attention, strict=True):
        on_them = (weights * repeated[:, None]).sum(-1)
        found[str(layer)] = [on_them[:, head][where].mean().item() for head in range(on_them.shape[1])]
    return found


@torch.no_grad()
def measure_load(model: K31ForCausalLM, rows: Tensor) -> list[list[float]]:
    """Share of the choices that each expert gets, times the number of experts: 1 is even; a list per MoE layer."""
    count = model.config.num_experts
    total: list[Tensor] = []
    for part in rows.split(BATCH):
        with watched(model) as seen:
            forward(model, part[:, :-1].contiguous())
        loads = [experts.flatten().bincount(minlength=count).double() for experts in seen.experts]
        total = [a + b for a, b in zip(total, loads, strict=True)] if total else loads
    return [(load / load.sum() * count).tolist() for load in total]


def measure(model: K31ForCausalLM, rows: Tensor, tick: Callable[[str], None] = lambda what: None) -> dict:
    """Everything for the model card, of a "native" model; `tick` is told what comes next."""
    found: dict = {"windows": len(rows), "bits_per_byte": {}}
    for selection in SELECTIONS:
        tick(f"bits per byte, {selection}")
        found["bits_per_byte"][selection] = bits_per_byte(model, rows, selection)
    sample = rows[:: max(1, len(rows) // 64)]
    tick("recall of the indexer")
    found["recall"] = [asdict(recall) for recall in measure_recall(model, sample)]
    tick("lookup heads")
    found["lookup"] = measure_lookup(model, sample[:16])
    tick("load of the experts")
    found["expert_load"] = measure_load(model, sample)
    return found
