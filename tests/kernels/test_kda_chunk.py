"""What only k31::kda_chunk must bear: strong gates, keys all alike, no state, ragged sequences."""

import pytest
import torch
from delta_cases import definition, draw, value_first, within

BOUND = 6e-7
OPERANDS = ("query", "key", "value", "gate", "beta")


@pytest.mark.parametrize("gate", [-5.0, -6.0, -50.0, -1000.0, -torch.inf])
@pytest.mark.parametrize("length", [15, 16, 17, 65])
def test_a_uniform_gate_however_strong(chunk, gate, length):
    case = draw(2, length, 3, 20, 12)
    case["gate"] = torch.full_like(case["gate"], gate)
    within(BOUND, chunk(**case), definition(**case))


@pytest.mark.parametrize("gate", [-50.0, -1000.0, -torch.inf])
def test_single_channels_forget_and_their_neighbours_do_not(chunk, gate):
    case = draw(2, 70, 3, 20, 12, strength=0.05)
    for t in (0, 5, 15, 16, 17, 18, 40, 69):
        case["gate"][:, t, :, t % 20] = gate
    case["gate"][1, 33, 2] = gate
    within(BOUND, chunk(**case), definition(**case))


def test_a_forgotten_state_may_have_been_anything(chunk):
    case = draw(1, 40, 2, 6, 10)
    case["gate"][:, 20] = -torch.inf
    output, last = chunk(**case)
    case["initial_state"] = case["initial_state"] * 1e30
    wild, wild_last = chunk(**case)
    within(BOUND, (wild[:, 20:], wild_last), (output[:, 20:], last))


def test_growing_states(chunk):
    """A gate above 0 is no decay; nothing forbids it."""
    case = draw(2, 20, 3, 6, 10, strength=-0.7)
    assert case["gate"].min() >= 0
    within(5e-6, chunk(**case), definition(**case))


@pytest.mark.parametrize(("beta", "bound"), [(0.5, BOUND), (1.0, BOUND), (2.0, 6e-6)])
def test_keys_all_alike(chunk, beta, bound):
    case = draw(2, 100, 3, 20, 12, strength=0.1)
    case["key"] = case["key"][:, :1].expand_as(case["key"])
    case["beta"] = torch.full_like(case["beta"], beta)
    within(bound, chunk(**case), definition(**case))


@pytest.mark.parametrize("length", [1, 5, 64])
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_no_state_stands_for_zeros(chunk, length, layout):
    case = draw(2, length, 3, 10, 21)
    case["initial_state"] = torch.zeros_like(case["initial_state"])
    expected = definition(**case)
    del case["initial_state"]
    output, last = chunk(**case, state_layout=layout)
    within(BOUND, (output, last if layout == "KV" else last.mT), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("given", [True, False])
def test_ragged_sequences(chunk, dtype, given):
    limits = [0, 0, 1, 18, 18, 50, 53, 85, 85]
    case = draw(1, limits[-1], 3, 10, 21)
    states = torch.stack([draw(1, 1, 3, 10, 21, seed=n)["initial_state"][0] for n in range(len(limits) - 1)]) * given
    case["initial_state"] = states
    call = case if given else {name: case[name] for name in OPERANDS}
    output, last = chunk(**call, cu_seqlens=torch.tensor(limits, dtype=dtype), scale=0.3)
    turned = value_first(case) if given else call | {"state_layout": "VK"}
    output_turned, last_turned = chunk(**turned, cu_seqlens=torch.tensor(limits, dtype=dtype), scale=0.3)
    assert last.shape == (8, 3, 10, 21)
    for n in range(8):
        piece = {name: case[name][:, limits[n] : limits[n + 1]] for name in OPERANDS}
        expected, expected_last = definition(**piece, initial_state=states[n : n + 1], scale=0.3)
        got = output[:, limits[n] : limits[n + 1]], last[n : n + 1]
        within(BOUND, got, (expected, expected_last))
        got = output_turned[:, limits[n] : limits[n + 1]], last_turned[n : n + 1].mT
        within(BOUND, got, (expected, expected_last))


def test_no_sequence_at_all(chunk):
    case = draw(1, 0, 3, 5, 7)
    del case["initial_state"]
    output, last = chunk(**case, cu_seqlens=torch.tensor([0]))
    assert output.shape == (1, 0, 3, 7)
    assert last.shape == (0, 3, 5, 7)


def test_nan_stays_in_its_head_and_its_sequence(chunk):
    case = draw(1, 40, 3, 5, 7)
    del case["initial_state"]
    clean, clean_last = chunk(**case, cu_seqlens=torch.tensor([0, 17, 40]))
    case["value"][0, 3, 1] = torch.nan
    output, last = chunk(**case, cu_seqlens=torch.tensor([0, 17, 40]))
    assert torch.isnan(output[0, 3, 1]).all()
    assert torch.equal(output[:, 17:], clean[:, 17:])
    assert torch.equal(output[:, :, ::2], clean[:, :, ::2])
    assert torch.equal(last[1], clean_last[1])
