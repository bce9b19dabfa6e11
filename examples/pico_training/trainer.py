"""One training run as a state that moves by steps."""

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from k31compile.model import Caches, K31Config, K31ForCausalLM
from k31compile.model.moe import Router
from pico_training.corpus import Corpus, training_rows
from pico_training.muon import Muon
from pico_training.objectives import indexer_loss, lookup_loss, next_byte_loss, repetitions
from pico_training.recipe import Recipe, build_model, for_training, split_parameters
from pico_training.watch import Seen, select_all, selecting, watched


class Trainer:
    """Model, optimisers and step of one run: a function of recipe, configuration and text, whatever interrupts it."""

    def __init__(self, recipe: Recipe, config: K31Config, corpus: Corpus) -> None:
        self.recipe, self.config, self.corpus, self.step = recipe, config, corpus, 0
        self.model = build_model(for_training(config), recipe.seed)
        groups = split_parameters(self.model)
        adam = {"betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
        self.muon = Muon(groups["muon"], recipe.muon_rate)
        self.adam = torch.optim.AdamW(groups["adam"], recipe.adam_rate, **adam)
        self.indexer = torch.optim.AdamW(groups["indexer"], recipe.indexer_rate, **adam)
        self.main_parameters, self.indexer_parameters = [*groups["muon"], *groups["adam"]], groups["indexer"]
        self.routers = [module for module in self.model.modules() if isinstance(module, Router)]

    @property
    def total_steps(self) -> int:
        """Steps of the whole model and then of the indexers alone."""
        return self.recipe.steps + self.recipe.indexer_steps

    def advance(self) -> dict[str, float]:
        """Take one step; return bits per byte of its text, and the other losses in nats."""
        recipe, step = self.recipe, self.step
        rows = training_rows(self.corpus, recipe.seed, step, recipe.rows, recipe.context)
        tokens = rows[:, :-1].contiguous()
        with watched(self.model, recipe.trains_indexer(step)) as seen, self.selection():
            byte_loss = next_byte_loss(forward(self.model, tokens), rows[:, 1:])
        losses = {"bits_per_byte": byte_loss.item() / math.log(2)}
        terms = [byte_loss] if step < recipe.steps else []
        if recipe.trains_indexer(step):
            views = zip(seen.scores, seen.attention, seen.allowed, strict=True)
            terms.append(torch.stack([indexer_loss(*view) for view in views]).sum())
            losses["indexer_nats"] = terms[-1].item()
        if recipe.lookup(step):
            repeated = repetitions(tokens)
            lookups = [lookup_loss(attention, repeated, recipe.lookup_heads) for attention in seen.attention]
            lookup = torch.stack(lookups).mean()
            losses["lookup_nats"] = lookup.item()
            terms.append(recipe.lookup(step) * lookup)
        torch.stack(terms).sum().backward()
        self._update(seen)
        self.step += 1
        return losses

    def selection(self) -> contextlib.AbstractContextManager[None]:
        """What attention reads at this step: everything, later what the indexer selects."""
        if self.recipe.is_sparse(self.step):
            return contextlib.nullcontext()
        return selecting(self.model, select_all, topk=1)

    def _update(self, seen: Seen) -> None:
        recipe, step = self.recipe, self.step
        if recipe.trains_indexer(step):
            torch.nn.utils.clip_grad_norm_(self.indexer_parameters, recipe.clip)
            _step(self.indexer, recipe.indexer_rate * recipe.indexer_factor(step))
        if step < recipe.steps:
            factor = recipe.factor(step)
            torch.nn.utils.clip_grad_norm_(self.main_parameters, recipe.clip)
            _step(self.muon, recipe.muon_rate * factor)
            _step(self.adam, recipe.adam_rate * factor)
            for router, experts in zip(self.routers, seen.experts, strict=True):
                balance(router, experts, recipe.bias_rate * factor)
        self.model.zero_grad()

    def for_serving(self) -> K31ForCausalLM:
        """The model as it is shipped: the forms of `config`, matrices in bfloat16."""
        served = K31ForCausalLM(self.config)
        served.load_state_dict(self.model.state_dict())
        return served.to_serving_dtype(torch.bfloat16)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        optimizers = [optimizer.state_dict() for optimizer in (self.muon, self.adam, self.indexer)]
        return {"step": self.step, "model": self.model.state_dict(), "optimizers": optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the run that `state_dict` was taken from."""
        self.model.load_state_dict(state["model"])
        for optimizer, held in zip((self.muon, self.adam, self.indexer), state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        self.step = state["step"]


def forward(model: K31ForCausalLM, tokens: Tensor) -> Tensor:
    """Logits [B, T, vocab] of whole texts, int64 [B, T], in caches of their own."""
    caches = Caches.allocate(model.config, *tokens.shape, dtype=model.lm_head.weight.dtype)
    logits: Tensor = model(tokens, caches, torch.zeros(tokens.shape[0], dtype=torch.int64))
    return logits


@torch.no_grad()
def balance(router: Router, experts: Tensor, rate: float) -> None:
    """Raise the bias of experts with less than the mean load, lower the others; only differences count."""
    bias = router.e_score_correction_bias
    load = experts.flatten().bincount(minlength=len(bias)).to(bias.dtype)
    bias += rate * (load.mean() - load).sign()
    bias -= bias.mean()


def _step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
