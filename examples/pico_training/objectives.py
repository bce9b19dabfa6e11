"""What pico is trained for: the next byte, an indexer that foresees the attention, heads that look up repetitions."""

import torch
from torch import Tensor, nn

MATCH_LENGTHS = (6, 4, 3)
"""Bytes that must agree for an earlier place to count as a repetition; the longest that has one is used."""
HASH_BASE = 1_000_003


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats per byte: logits [B, T, 256], targets int64 [B, T]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def indexer_loss(scores: Tensor, attention: Tensor, allowed: Tensor) -> Tensor:
    """KL(attention averaged over heads || softmax of the index scores) over the allowed keys, in nats per token.

    scores [B, T, S], attention [B, H, T, S] (takes no gradient), allowed bool [B, T, S] (K3.1 spec 2.8).
    """
    target = attention.detach().mean(1)
    log_p = scores.masked_fill(~allowed, float("-inf")).log_softmax(-1).masked_fill(~allowed, 0.0)
    return (torch.xlogy(target, target) - target * log_p).sum(-1).mean()


def repetitions(tokens: Tensor) -> Tensor:
    """Places that continue what the last bytes repeat: bool [B, T, T], true at [b, t, s] for s <= t where the bytes
    before s equal those up to t, the longest of MATCH_LENGTHS that occurs anywhere."""
    found = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool)
    for length in MATCH_LENGTHS:
        code = torch.zeros_like(tokens)
        for back in range(length):
            code = code * HASH_BASE + nn.functional.pad(tokens, (back, 0), value=-1)[:, : tokens.shape[1]]
        # code[t] covers bytes t-length+1..t; column s speaks of the bytes before s.
        same = code[:, :, None] == nn.functional.pad(code, (1, 0), value=-1)[:, None, :-1]
        same = same.tril()
        found = torch.where(found.any(-1, keepdim=True), found, same)
    return found


def lookup_loss(attention: Tensor, repeated: Tensor, heads: int) -> Tensor:
    """-log of the weight that the first `heads` heads give to repetitions, averaged over the tokens that have one.

    attention [B, H, T, S], repeated bool [B, T, S] -> nats. Without it no head of so small a model learns to look up
    an earlier occurrence in the few million bytes that it sees.
    """
    weight = (attention[:, :heads] * repeated[:, None]).sum(-1)
    has_one = repeated.any(-1)[:, None].expand_as(weight)
    return -(weight + 1e-6).log().mul(has_one).sum() / has_one.sum().clamp(min=1)
