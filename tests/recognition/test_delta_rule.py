"""The delta rule in the corpus' spellings: fused and counted, near misses never mistaken, numbers those of eager."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from running import run

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))

import catalogue
from judging import difference
from operands import operands

OPERATORS = ("kda_recurrent", "kda_chunk", "gated_delta_recurrent", "gated_delta_chunk")
SPELLINGS = {name: one for name, one in catalogue.SPELLINGS.items() if one.operator in OPERATORS}
NEAR_MISSES = {name: one for name, one in catalogue.NEAR_MISSES.items() if one.operator in OPERATORS}
LEFT_WHEN_LONGER = {"heads_as_a_batch": "batch and heads are one dimension of the state"}
"""Spellings that are not recognised, and why."""
BOUND = 2e-5


def fused(program, length, seed=0):
    """What became of a program of the corpus, the fusions of this family, and how far its numbers are from eager's."""
    done = run(program.fn, *operands(program, length, torch.float32, seed), stable=False)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (done.got, done.want))
    names = program.results
    error = difference(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))
    return Counter({name: n for name, n in done.fused.items() if name in OPERATORS}), error, done


def each(table, lengths=slice(None)):
    """(program, length) for every length of every program, by name."""
    pairs = [(one, length) for one in table.values() for length in one.lengths[lengths]]
    return pytest.mark.parametrize(("program", "length"), pairs, ids=[f"{one.name}-{length}" for one, length in pairs])


@each(SPELLINGS, slice(0, 1))
def test_a_spelling_is_fused(program, length):
    found, error, _ = fused(program, length)
    assert error < BOUND
    assert found == {name: n for name, n in program.counts.items() if name in OPERATORS}


@pytest.mark.slow
@each(SPELLINGS, slice(1, None))
def test_a_spelling_is_fused_at_other_lengths(program, length):
    found, error, _ = fused(program, length)
    assert error < BOUND
    if program.name not in LEFT_WHEN_LONGER:
        assert found == {name: n for name, n in program.counts.items() if name in OPERATORS}


@each(NEAR_MISSES, slice(0, 1))
def test_a_near_miss_keeps_its_numbers(program, length):
    """Whatever is made of it computes what the author wrote; the operator itself appears only where it can serve."""
    found, error, _ = fused(program, length)
    assert error < BOUND
    if program.excluded:
        assert not found[program.operator]


def test_a_scalar_gate_is_never_called_kda():
    one = NEAR_MISSES["one_gate_a_head"]
    found, error, _ = fused(one, 1)
    assert error < BOUND
    assert found == {"gated_delta_recurrent": 1}


def test_a_refusal_names_the_place_and_what_to_change():
    def keeps_every_state(q, k, v, g, beta, state):
        states = []
        for t in range(3):
            state = g[:, t].exp().unsqueeze(-1) * state
            update = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
            state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
            states.append(state)
        return torch.einsum("bhkv,bhk->bhv", state, q[:, 2]), torch.stack(states)

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 3, 5, 6, generator=generator), dim=-1) for _ in "qk")
    v, g = torch.randn(2, 3, 5, 7, generator=generator), -torch.rand(2, 3, 5, 6, generator=generator)
    beta, state = torch.rand(2, 3, 5, generator=generator), torch.randn(2, 5, 6, 7, generator=generator)
    done = run(keeps_every_state, q, k, v, g, beta, state, stable=False)
    torch.testing.assert_close(done.got, done.want)
    assert "kda_recurrent" not in done.fused
    assert any("test_delta_rule.py" in refusal.where for refusal in done.refused)
