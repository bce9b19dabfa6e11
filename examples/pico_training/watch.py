"""Look into the model while it runs, and choose what its sparse attention may read; the model itself is unchanged."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor, nn

from k31compile.model import K31ForCausalLM, Step, indexer, sparse_attention

Select = Callable[[Tensor, Step], Tensor]
"""(the indexer's choice int64 [B, T, k], step) -> the keys to attend to, int64 [B, T, any number]."""


@dataclass
class Seen:
    """What one forward call has shown, an item per MLA layer in order, and per MoE layer for `experts`.

    attention [B, H, T, S], the weights; allowed bool [B, T, S], selected and visible; scores [B, T, S], the indexer's,
    not masked; experts int64 [N, k].
    """

    attention: list[Tensor] = field(default_factory=list)
    allowed: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)

    def clear(self) -> None:
        """Forget the last call."""
        for items in (self.attention, self.allowed, self.scores, self.experts):
            items.clear()


def indexers(model: K31ForCausalLM) -> list[indexer.LightningIndexer]:
    """The indexers in order of their layers."""
    return [module for module in model.modules() if isinstance(module, indexer.LightningIndexer)]


@contextmanager
def watched(model: K31ForCausalLM, train_indexer: bool = True) -> Iterator[Seen]:
    """Collect attention weights, index scores and chosen experts of every call; needs mla_form "native".

    The indexers read detached inputs, so that what trains them cannot reach the rest of the model; unless they are
    to be trained nothing is kept for their gradient.
    """
    from k31compile.model.moe import Router

    seen = Seen()
    softmax, index_scores = sparse_attention.masked_softmax, indexer.index_scores

    def watched_softmax(logits: Tensor, mask: Tensor) -> Tensor:
        weights = softmax(logits, mask)
        seen.attention.append(weights)
        seen.allowed.append(mask.squeeze(1))
        return weights

    def watched_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        with torch.set_grad_enabled(train_indexer and torch.is_grad_enabled()):
            seen.scores.append(index_scores(q, keys, weights))
        return seen.scores[-1]

    def detached(_module: nn.Module, args: tuple) -> tuple:
        return (args[0].detach(), args[1].detach(), *args[2:])

    def routed(_module: nn.Module, _args: tuple, out: tuple[Tensor, Tensor]) -> None:
        seen.experts.append(out[0])

    with ExitStack() as stack:
        stack.enter_context(patch.object(sparse_attention, "masked_softmax", watched_softmax))
        stack.enter_context(patch.object(indexer, "index_scores", watched_scores))
        for module in model.modules():
            if isinstance(module, indexer.LightningIndexer):
                stack.callback(module.register_forward_pre_hook(detached).remove)
            elif isinstance(module, Router):
                stack.callback(module.register_forward_hook(routed).remove)
        yield seen


@contextmanager
def selecting(model: K31ForCausalLM, select: Select, topk: int | None = None) -> Iterator[None]:
    """Replace the choice of every indexer by `select`, and for the while how many keys it takes."""

    def replaced(_module: nn.Module, args: tuple, out: Tensor) -> Tensor:
        return select(out, args[3])

    with ExitStack() as stack:
        for module in indexers(model):
            if topk is not None:
                stack.enter_context(patch.object(module, "topk", topk))
            stack.callback(module.register_forward_hook(replaced).remove)
        yield


def select_indexed(chosen: Tensor, step: Step) -> Tensor:
    """What the indexer chose."""
    return chosen


def select_all(chosen: Tensor, step: Step) -> Tensor:
    """Every key: attention as if it were dense."""
    return torch.arange(step.visible.shape[-1], device=chosen.device).expand(step.visible.shape)


def select_window(chosen: Tensor, step: Step) -> Tensor:
    """The last k keys, as many as the indexer takes."""
    back = torch.arange(chosen.shape[-1], device=chosen.device)
    return (step.positions[..., None] - back).clamp(min=0)


def random_selection(seed: int) -> Select:
    """k visible keys at random, anew for every token and layer."""
    generator = torch.Generator().manual_seed(seed)

    def select(chosen: Tensor, step: Step) -> Tensor:
        noise = torch.rand(step.visible.shape, generator=generator).masked_fill(~step.visible, -1.0)
        return noise.topk(chosen.shape[-1], dim=-1).indices

    return select
