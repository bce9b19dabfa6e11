"""The gated RMS norm: every spelling of the corpus with the bits of its author, and nothing that is only near."""

import pytest
import torch
from small_operators import NEAR_MISSES, SPELLINGS, cases, fates, passed, through, with_weights

from k31compile.model.norms import GatedRMSNorm, RMSNorm
from k31compile.passes.recognise.gated_rms_norm import GatedRMSNormRecogniser

NAME, EPS = "gated_rms_norm", 1e-5
MUTATED = ("weight_stored_less_one", "gate_then_norm", "divided_by_the_root", "silu_written_out")


def rows(dtype=torch.float32, *shape):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape or (2, 7, 24), generator=generator).to(dtype)


def norm(x, dim=-1):
    return x * torch.rsqrt(x.square().mean(dim, keepdim=True) + EPS)


@pytest.mark.parametrize(("name", "length", "dtype"), cases(SPELLINGS, NAME))
def test_spelling(name, length, dtype):
    result = passed(NAME, SPELLINGS[name], length, dtype)
    assert result.count(NAME) == 1, result.reasons
    assert result.error <= (2e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize(("name", "length", "dtype"), cases(NEAR_MISSES, NAME))
def test_near_miss(name, length, dtype):
    result = passed(NAME, NEAR_MISSES[name], length, dtype)
    assert result.error <= 1e-5
    assert not (NEAR_MISSES[name].excluded and result.count(NAME))


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [torch.float32, torch.bfloat16])
def test_the_model_of_the_house(stream, gate):
    call, weights = with_weights(GatedRMSNorm(24, EPS))
    result = through(NAME, call, lambda: [*weights, rows(stream), rows(gate)])
    assert result.count(NAME) == 1, result.reasons
    assert result.error <= (2e-6 if gate == torch.float32 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_a_row_and_a_flat_weight(dtype):
    def grouped(x, gate, weight):
        normed = norm((x.float() * torch.nn.functional.silu(gate.float())).view(2, -1, 3, 8))
        return weight * normed.view(2, -1, 24).to(x.dtype)

    result = through(NAME, grouped, lambda: [rows(dtype), rows(dtype) + 1, rows(dtype, 24)])
    assert result.count(NAME) == 1, result.reasons
    assert result.error <= (2e-6 if dtype == torch.float32 else 0)


def test_a_symbolic_length_stays_one():
    module = GatedRMSNorm(24, EPS).requires_grad_(False)
    result = through(NAME, module.forward, lambda: [rows(), rows()], dynamic=True)
    assert result.count(NAME) == 1, result.reasons


def test_a_long_sequence_is_confirmed_at_few_rows():
    def many(x, gate, weight):
        return (norm(x.view(-1, 24)) * weight * gate.view(-1, 24).sigmoid()).view(1, 4096, 72)

    made = [rows(torch.float32, 1, 4096, 72), rows(torch.float32, 1, 4096, 72) + 1, rows(torch.float32, 24)]
    result = through(NAME, many, lambda: made)
    assert result.count(NAME) == 1, result.reasons
    assert result.error <= 2e-6


OTHERS = {
    "nothing in float32": lambda x, g, w: norm(x) * w.to(x.dtype) * g.sigmoid(),
    "a weight behind and a gate in bfloat16": lambda x, g, w: norm(x.float()).to(x.dtype) * w.to(x.dtype) * g.sigmoid(),
}
STRANGERS = {
    "no gate": lambda x, g, w: norm(x) * w,
    "a gated layer": lambda x, g, w: (norm(x) * w) @ (g.mT @ torch.nn.functional.silu(g)),
    "unit length": lambda x, g, w: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) * g,
    "eps of the type": lambda x, g, w: torch.nn.functional.rms_norm(x, (24,), w) * g.sigmoid(),
    "over time": lambda x, g, w: norm(x, 1) * w * g.sigmoid(),
    "clamped gate": lambda x, g, w: norm(x) * w * g.clamp(-60, 60).sigmoid(),
    "steeper gate, never opened": lambda x, g, w: norm(x) * w * (1.702 * g).sigmoid().clamp_max(0.999999),
    "normed rows returned": lambda x, g, w: (norm(x) * w * g.sigmoid(), norm(x)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_roundings_are_refused_with_a_sentence(name):
    result = through(NAME, OTHERS[name], lambda: [rows(torch.bfloat16), rows(torch.bfloat16) + 1, rows().mean((0, 1))])
    assert result.count(NAME) == 0
    assert result.reasons


@pytest.mark.parametrize("name", STRANGERS)
def test_numbers_stay_those_of_the_author(name):
    """Where a part is the operator after all it may be fused; nothing may change."""
    result = through(NAME, STRANGERS[name], lambda: [rows() * 1e-2, 80 * rows(), rows().mean((0, 1))])
    assert result.error <= 1e-6


def test_a_plain_norm_is_not_mentioned():
    call, weights = with_weights(RMSNorm(24, EPS))
    result = through(NAME, call, lambda: [*weights, rows(torch.bfloat16)])
    assert (result.count(NAME), result.reasons) == (0, [])


@pytest.mark.parametrize("name", MUTATED)
def test_no_mutant_is_taken_wrongly(name):
    count, false = fates(GatedRMSNormRecogniser(), SPELLINGS[name], 7, every=3)
    assert not false, "\n".join(f"{verdict.name}: {verdict.detail}" for verdict in false)
    assert count["killed"] > 0
