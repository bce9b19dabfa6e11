"""Greedy generation: prompts in padded chunks of one shape, then one token a step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from k31compile.model.caches import Caches
from k31compile.model.config import K31Config
from k31compile.model.errors import ModelError

Forward = Callable[..., Tensor]


@torch.no_grad()
def prefill(model: Forward, caches: Caches, prompts: Sequence[Sequence[int]], chunk: int = 64) -> Tensor:
    """Feed ragged prompts in pieces of shape [B, chunk] -> logits [B, vocab] after each prompt's last token.

    The caches must have been reset. A shorter prompt takes part in the later pieces with no valid token.
    """
    device = caches.block_table.device
    totals = torch.tensor([len(prompt) for prompt in prompts], device=device)
    pieces = -(-max(len(prompt) for prompt in prompts) // chunk)
    tokens = torch.zeros(len(prompts), pieces * chunk, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(device)
    last: Tensor | None = None
    for begin in range(0, pieces * chunk, chunk):
        start, lengths = totals.clamp(max=begin), (totals - begin).clamp(0, chunk)
        logits = model(_own(tokens[:, begin : begin + chunk]), caches, start, lengths)
        ends = logits[torch.arange(len(prompts), device=device), (lengths - 1).clamp(min=0)]
        last = ends if last is None else torch.where((lengths > 0)[:, None], ends, last)
    assert last is not None
    return last


@torch.no_grad()
def generate(
    model: Forward,
    prompt_tokens: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    chunk: int = 64,
    caches: Caches | None = None,
    *,
    config: K31Config | None = None,
    eos_token_id: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Continue each prompt greedily; return the new tokens of each, the end token included.

    model is a K31ForCausalLM or anything called like it (a compiled one), then with `config` unless `caches`
    are given. Given caches are reset first. on_token(request, token) is called as soon as a token is known.
    """
    prompts = _as_prompts(prompt_tokens)
    needed = max(len(prompt) for prompt in prompts) + max_new_tokens
    if caches is None:
        caches = _allocate(model, config, len(prompts), needed)
    if caches.batch_size != len(prompts):
        raise ModelError(f"{len(prompts)} prompts for caches of {caches.batch_size} requests: give one prompt each")
    caches.check_room(needed)
    caches.reset()
    device = caches.block_table.device
    position = torch.tensor([len(prompt) for prompt in prompts], device=device)
    results: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    logits = prefill(model, caches, prompts, chunk)
    for produced in range(max_new_tokens):
        token = logits.argmax(-1)
        for request, value in enumerate(token.tolist()):
            if request in running:
                results[request].append(value)
                if on_token is not None:
                    on_token(request, value)
                if value == eos_token_id:
                    running.discard(request)
        if not running or produced + 1 == max_new_tokens:
            break
        logits = model(token[:, None], caches, position)[:, -1]
        position = position + 1
    return results


def _own(piece: Tensor) -> Tensor:
    """A piece with memory of its own: one row of a longer tensor counts as contiguous and has that tensor's stride."""
    return piece.clone(memory_format=torch.contiguous_format)


def _as_prompts(prompt_tokens: Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    """Ragged lists, or an int tensor [T] or [B, T], as non-empty lists."""
    if isinstance(prompt_tokens, Tensor):
        prompt_tokens = prompt_tokens.reshape(-1, prompt_tokens.shape[-1]).tolist()
    prompts = [list(prompt) for prompt in prompt_tokens]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ModelError(f"prompt {row} is empty: give at least one token, for example the begin token")
    if not prompts:
        raise ModelError("no prompt was given: pass a list with one list of tokens per request")
    return prompts


def _allocate(model: Forward, config: K31Config | None, batch_size: int, max_tokens: int) -> Caches:
    """Caches that fit the model; a callable that is no module says nothing of its dtype, so float32 there."""
    config = config if config is not None else getattr(model, "config", None)
    if config is None:
        raise ModelError("generate() cannot tell the sizes of this callable: pass config=... or caches=...")
    weight = getattr(getattr(model, "lm_head", None), "weight", None)
    if isinstance(weight, Tensor):
        return Caches.allocate(config, batch_size, max_tokens, dtype=weight.dtype, device=weight.device)
    return Caches.allocate(config, batch_size, max_tokens)
