"""What the tests of leaves share: a store of their own, fresh compiler state."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from k31compile.leaves import known
from k31compile.leaves.known import KNOWN
from k31compile.report import clear_reports


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """No graph, no report and no knowledge of an earlier test."""
    (tmp_path / "functions").mkdir(mode=0o700)
    monkeypatch.setattr(known, "_folder", lambda: tmp_path / "functions")  # kernels stay where they are built
    torch._dynamo.reset()
    clear_reports()
    KNOWN.forget()
    yield
    torch._dynamo.reset()
    KNOWN.forget()
