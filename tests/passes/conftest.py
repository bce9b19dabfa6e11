"""Helpers by their short names; one thread; no compiled graph and no confirmation kept between tests."""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "graph")]


@pytest.fixture(autouse=True)
def _alone():
    from k31compile.graph.memory import MEMORY
    from k31compile.report import clear_reports

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    MEMORY.forget()
    clear_reports()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before)
