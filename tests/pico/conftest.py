"""The checkpoint, its text sample, and the training code of examples/ on the path."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))


@pytest.fixture(scope="session")
def pico_folder() -> Path:
    return ROOT / "examples" / "pico"


@pytest.fixture(scope="session")
def sample() -> torch.Tensor:
    """Seven windows of our own Python, which no standard library holds: int64 [7, 513]."""
    text = torch.tensor(list((Path(__file__).parent / "sample.txt").read_bytes()))
    return torch.stack([text[start : start + 513] for start in range(0, len(text) - 512, 512)])
