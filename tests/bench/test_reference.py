"""What a whole model is compared with: copies, dtypes, and equal scores."""

from pathlib import Path

import pytest
import torch

from k31compile import Entry
from k31compile.bench.reference import LowestFirst, differs, numbers_of, write_reference


class Doubling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.1, 1.0, 256))

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache += 1
        return x * self.weight / 3 + cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_held_to_eager_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model, file = Doubling().to(dtype), tmp_path / "reference.pt"
    x, cache = torch.linspace(-1, 1, 256, dtype=dtype), torch.zeros(256, dtype=dtype)
    entry = Entry("one", model, (x, cache))
    write_reference(entry, file)
    assert not cache.any(), "the reference is computed on a copy"
    result = entry.call()
    assert differs(numbers_of(result), file) == ""
    assert "away from eager in float32" in differs(numbers_of(result * 1.1), file)
    assert "away from eager" in differs(numbers_of(result * float("nan")), file)
    assert differs([], file) == "0 results instead of 1"
    assert differs([result[:2]], file) == "result 0 is [2], not [256]"


class Picking(torch.nn.Module):
    """Adds up values where scores are best; its two best are three, and they are equal."""

    def forward(self, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values[scores.topk(2).indices].sum(0)


SCORES, VALUES = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0]), torch.tensor([[16.0], [1.0], [8.0], [2.0], [4.0]])


def test_equal_scores_may_be_told_apart_either_way(tmp_path: Path) -> None:
    file = tmp_path / "reference.pt"
    entry = Entry("one", Picking(), (SCORES, VALUES))
    write_reference(entry, file)
    lowest = VALUES[1] + VALUES[3]
    for right in (entry.call(), lowest):
        assert differs([right], file) == ""
    for wrong in (VALUES[1] + VALUES[2], VALUES[0] + VALUES[1], VALUES[1]):
        assert "away from eager" in differs([wrong], file)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_lowest_positions_of_equal_values_are_taken(largest: bool, dim: int) -> None:
    values = torch.randint(0, 4, (37, 41), generator=torch.Generator().manual_seed(0)).double()
    with LowestFirst():
        found, positions = values.topk(9, dim=dim, largest=largest)
    assert torch.equal(found, values.topk(9, dim=dim, largest=largest).values)
    # a position's own small share makes of equal values the lowest one the best, and of others nothing
    places = torch.arange(values.shape[dim], dtype=torch.float64).unflatten(0, (-1, 1) if dim == 0 else (1, -1))
    apart = values + places * (-1e-3 if largest else 1e-3)
    assert torch.equal(positions, apart.topk(9, dim=dim, largest=largest).indices)


class Deciding(torch.nn.Module):
    """Rows of ones; a row grows or shrinks by its `step` as one of two equal weights becomes the larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, step: torch.Tensor) -> torch.Tensor:
        return 1 + step[:, None] * torch.sign(self.weight[0] - self.weight[1]) * torch.ones(16)


def test_rows_that_a_last_bit_decides_may_differ_but_not_most_of_them(tmp_path: Path) -> None:
    file, step = tmp_path / "reference.pt", torch.zeros(32)
    step[5] = 0.5
    write_reference(Entry("one", Deciding(), (step,)), file)
    result = torch.ones(32, 16)
    result[5] += step[5]
    assert differs([result], file) == ""
    assert "half of the rows" in differs([result * 1.01], file)
    assert "away from eager" in differs([result + step[:, None]], file)
    write_reference(Entry("one", Deciding(), (0 * step,)), file)
    assert "away from eager" in differs([result], file), "no last bit explains this one"
