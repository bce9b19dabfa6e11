"""A rule of tokens in loops over requests, tokens and heads: called as a whole, whatever its name and however long."""

import pytest
import torch
from torch import nn

import k31compile


def golden(q, k, v, g, beta, state):
    """One pair of rows after the other."""
    out, state = torch.zeros_like(v), state.clone()
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                kept = g[b, t, h].exp()[:, None] * state[b, h]
                gap = (v[b, t, h] - k[b, t, h] @ kept) * beta[b, t, h]
                state[b, h] = kept + torch.outer(k[b, t, h], gap)
                out[b, t, h] = q[b, t, h] @ state[b, h]
    return out, state


def every_second_head(q, k, v, g, beta, state):
    out, state = torch.zeros_like(v), state.clone()
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                kept = g[b, t, h - h % 2].exp()[:, None] * state[b, h]
                gap = (v[b, t, h] - k[b, t, h] @ kept) * beta[b, t, h]
                state[b, h] = kept + torch.outer(k[b, t, h], gap)
                out[b, t, h] = q[b, t, h] @ state[b, h]
    return out, state


def forgets_after_four(q, k, v, g, beta, state):
    out, state = torch.zeros_like(v), state.clone()
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                kept = g[b, t, h].exp()[:, None] * state[b, h] * (t < 4)
                gap = (v[b, t, h] - k[b, t, h] @ kept) * beta[b, t, h]
                state[b, h] = kept + torch.outer(k[b, t, h], gap)
                out[b, t, h] = q[b, t, h] @ state[b, h]
    return out, state


def without_the_prediction(q, k, v, g, beta, state):
    out, state = torch.zeros_like(v), state.clone()
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                kept = g[b, t, h].exp()[:, None] * state[b, h]
                state[b, h] = kept + torch.outer(k[b, t, h], v[b, t, h] * beta[b, t, h])
                out[b, t, h] = q[b, t, h] @ state[b, h]
    return out, state


class Model(nn.Module):
    """A rule inside of something else."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, q, *others):
        out, state = self.rule(torch.tanh(q), *others)
        return 2 * out, state


def operands(length, batch=2, heads=3, k=5, v=4):
    made = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(shape, generator=made)

    gate, beta = -normal(batch, length, heads, k).abs(), normal(batch, length, heads).sigmoid()
    q, keys = normal(batch, length, heads, k), nn.functional.normalize(normal(batch, length, heads, k), dim=-1)
    return q, keys, normal(batch, length, heads, v), gate, beta, normal(batch, heads, k, v)


@torch.no_grad()
def test_the_rule_is_one_operator_for_any_length(compiled, fused):
    model = Model(golden)
    nodes = []
    for length in (3, 70):
        for got, want in zip(compiled(model, dynamic=False)(*operands(length)), model(*operands(length)), strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
        assert len(fused()) == 1
        assert set(fused()) < {"kda_recurrent", "kda_chunk"}
        nodes.append(k31compile.last_report().nodes_before)
        (leaf,) = k31compile.last_report().leaves
        assert (leaf["function"], leaf["why"]) == ("golden", "learned" if len(nodes) > 1 else "nested loops")
    assert nodes[0] == nodes[1]


@torch.no_grad()
def test_a_frame_of_its_own_is_one_operator(compiled, fused):
    for got, want in zip(compiled(golden)(*operands(4)), golden(*operands(4)), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert fused() == {"kda_recurrent": 1}


@pytest.mark.parametrize("rule", [every_second_head, forgets_after_four, without_the_prediction])
@torch.no_grad()
def test_a_lie_keeps_its_numbers(rule, compiled, fused):
    given = operands(5, batch=1, heads=2)
    for ours, theirs in zip(compiled(Model(rule))(*given), Model(rule)(*given), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    assert not k31compile.last_report().leaves
