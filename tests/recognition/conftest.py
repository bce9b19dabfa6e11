"""The helpers of this folder by their short names; one thread; nothing remembered from one test to the next."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


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
