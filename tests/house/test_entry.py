"""Entries: their parts fit together, or the error says which does not."""

from typing import Any

import pytest
import torch

from k31compile import Entry
from k31compile.errors import EntryError

X = torch.zeros(2, 5)


def entry(**changes: Any) -> Entry:
    given: dict[str, Any] = {"name": "e", "model": torch.nn.Identity(), "args": (X,)}
    return Entry(**{**given, **changes})


def test_an_entry_is_called_in_its_mode() -> None:
    seen = entry(model=lambda x, scale: (x * scale, torch.is_grad_enabled()), kwargs={"scale": 2}).call()
    assert torch.equal(seen[0], X)
    assert seen[1] is False
    assert entry(model=lambda x: torch.is_inference_mode_enabled(), mode="inference_mode").call() is True
    with torch.no_grad():
        assert entry(model=lambda x: torch.is_grad_enabled(), mode="grad").call() is True


def test_paths_reach_into_arguments() -> None:
    nested = entry(kwargs={"cache": {"keys": [X]}}, dynamic={"0": {0: ("b", 1, 8)}, "cache.keys.0": {-1: ("t", 1, 9)}})
    assert nested.at("cache.keys.0") is X
    assert nested.at("0.T").shape == (5, 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": ""}, "needs a name"),
        ({"model": 3}, "cannot be called"),
        ({"args": X}, "args is a Tensor"),
        ({"kwargs": [1]}, "kwargs is a list"),
        ({"mode": "nograd"}, "no mode 'nograd' (entry 'e'); modes: no_grad"),
        ({"dynamic": {"1": {0: ("b", 1, 8)}}}, "no '1' in the arguments"),
        ({"dynamic": {"0": {2: ("b", 1, 8)}}}, "no dimension 2 of '0'"),
        ({"dynamic": {"0": {0: ("b", 3, 8)}}}, "is 2, outside of 3..8"),
        ({"dynamic": {"0": {0: ("b", 8, 1)}}}, "has bounds"),
        ({"dynamic": {"0": {0: ("b", 1)}}}, "has bounds"),
        ({"dynamic": {"0": {0: ("b", 1, 8), 1: ("b", 1, 9)}}}, "two different bounds"),
        ({"dynamic": {"0": {0: ("b", 1, 8), 1: ("b", 1, 8)}}}, "'b' is 2 in one place and 5"),
        ({"kwargs": {"n": 3}, "dynamic": {"n": {0: ("b", 1, 8)}}}, "not a tensor"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(EntryError) as caught:
        entry(**changes)
    assert says in str(caught.value)


def test_an_entry_is_frozen() -> None:
    with pytest.raises(AttributeError):
        entry().name = "other"  # type: ignore[misc]
