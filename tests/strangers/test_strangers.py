"""Authors that the recognisers have not met: fused, or a known limit, and never with other numbers."""

import pytest
import torch
from common_bugs import NEAR_MISSES, adversaries_of
from plain_weights import BUGS
from run import all_strangers
from stranger import TOLERANCE, Stranger, distance, measure

SLOW = {"fla_columns", "model_file_64", "helpers_inv", "jax_solve_eye", "keras_chunk"}
SLOW_KINDS = ("WrongChunk",)


def parameters():
    for file, stranger in all_strangers():
        marks = [pytest.mark.slow] if stranger.name in SLOW else []
        if stranger.limit:
            marks.append(pytest.mark.xfail(reason=stranger.limit, strict=True, raises=AssertionError))
        yield pytest.param(stranger, id=f"{file}-{stranger.name}", marks=marks)


@pytest.mark.parametrize("stranger", list(parameters()))
def test_a_stranger_is_fused(stranger: Stranger):
    outcome = measure(stranger)
    if outcome.worst > TOLERANCE:
        # No AssertionError: wrong numbers are not what a known limit expects.
        raise ValueError(f"its numbers differ from eager by {outcome.worst:.1e}: {outcome.fused}")
    assert outcome.complete, f"{outcome.fused}: {outcome.refused}"


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param(s, id=s.name, marks=[pytest.mark.slow] if s.name.startswith(SLOW_KINDS) else [])
        for s in (*NEAR_MISSES, *BUGS)
    ],
)
def test_a_bug_keeps_its_numbers(stranger: Stranger):
    outcome = measure(stranger, adversaries_of(stranger.name))
    assert outcome.worst <= TOLERANCE, f"fused {outcome.fused}, its numbers differ from eager by {outcome.worst:.1e}"


def test_the_distance_sees_what_differs():
    ones = torch.ones(3)
    assert distance(ones, ones + 1e-3) > TOLERANCE
    assert distance((ones, [ones.log() / 0]), (ones, [ones])) == float("inf")
    assert distance(torch.tensor([1, 2]), torch.tensor([2, 1])) > TOLERANCE


def test_every_bug_differs_from_what_is_right():
    """A near miss that computes the right thing would prove nothing: each bug of a kind gives other numbers."""
    again = {"one-hot rows of biased scores", "a logsumexp before the mask", "a logsumexp over the heads"}
    by_kind: dict[str, list] = {}
    # Spellings of a bug that is there in another spelling too.
    for stranger in (one for one in (*NEAR_MISSES, *BUGS) if one.name.split(": ")[1] not in again):
        torch.manual_seed(7)
        function, arguments = stranger.build()
        with torch.no_grad():
            result = stranger.meaning(function(*arguments))
        by_kind.setdefault(stranger.name.split(":")[0], []).append(result)
    for kind, results in by_kind.items():
        for i, one in enumerate(results):
            for other in results[:i]:
                same_shapes = str([x.shape for x in _tensors(one)]) == str([x.shape for x in _tensors(other)])
                assert not same_shapes or distance(one, other) > TOLERANCE, kind


def _tensors(result):
    return [result] if not isinstance(result, tuple) else list(result)
