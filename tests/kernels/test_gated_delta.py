"""Every implementation of k31::gated_delta_recurrent and k31::gated_delta_chunk: one decay for a whole head."""

import pytest
import torch
from delta_cases import definition, draw, value_first, within

import k31compile.kernels as kernels
from k31compile.errors import OperatorError

BOUND = 6e-7


def draw_scalar(*sizes, **options):
    """A case whose gate is [B, T, H], and the same with the gate repeated over the channels."""
    case = draw(*sizes, **options)
    gate = case["gate"][..., 0]
    return case | {"gate": gate}, case | {"gate": gate[..., None].expand_as(case["gate"])}


@pytest.mark.parametrize("length", [1, 15, 16, 17, 65])
@pytest.mark.parametrize("sizes", [(5, 7), (40, 24)], ids=str)
def test_equals_the_recurrence(gated_delta, length, sizes):
    case, repeated = draw_scalar(2, length, 3, *sizes)
    expected = definition(**repeated, scale=0.3)
    within(BOUND, gated_delta(**case, scale=0.3), expected)
    output, last = gated_delta(**value_first(case), scale=0.3)
    within(BOUND, (output, last.mT), expected)


@pytest.mark.parametrize("gate", [-6.0, -1000.0, -torch.inf])
def test_strong_gates(gated_delta, gate):
    case, repeated = draw_scalar(2, 40, 3, 20, 12)
    for side in (case, repeated):
        side["gate"] = side["gate"].clone()
        side["gate"][:, 5::7] = gate
    within(BOUND, gated_delta(**case), definition(**repeated))


def test_bfloat16_and_transposed_gates(gated_delta):
    case, repeated = draw_scalar(2, 20, 3, 20, 12, dtype=torch.bfloat16)
    within(BOUND, gated_delta(**case), definition(**repeated))
    case["gate"] = case["gate"].transpose(1, 2).contiguous().transpose(1, 2)
    within(BOUND, gated_delta(**case), definition(**repeated))


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_references_in_float64(form):
    case, repeated = draw_scalar(2, 37, 3, 5, 7, dtype=torch.float64)
    within(1e-13, getattr(kernels, f"gated_delta_{form}_reference")(**case), definition(**repeated))


def test_ragged_sequences_without_a_state():
    case, repeated = draw_scalar(1, 40, 3, 5, 7)
    for side in (case, repeated):
        side.pop("initial_state")
    limits = torch.tensor([0, 17, 17, 40])
    got = torch.ops.k31.gated_delta_chunk(**case, cu_seqlens=limits, scale=0.3)
    within(BOUND, got, kernels.kda_chunk_reference(**repeated, cu_seqlens=limits, scale=0.3))


def test_a_gate_of_another_rank_is_refused(gated_delta):
    case, repeated = draw_scalar(2, 3, 4, 5, 7)
    with pytest.raises(OperatorError, match=r"gate must be \[B, T, H\], not \[2, 3, 4, 5\]"):
        gated_delta(**repeated)
    case["gate"] = case["gate"][:, :, :3]
    with pytest.raises(OperatorError, match=r"gate must begin with .* \[2, 3, 4\], not"):
        gated_delta(**case)
