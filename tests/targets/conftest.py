"""The graph helpers by their short names; one thread; no compiled graph kept from one test to the next."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))


@pytest.fixture(autouse=True)
def _alone():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before)
