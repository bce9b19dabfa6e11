"""Compile a layer for operators, and compare it with itself."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from expert_loops import WIDTH

import k31compile
from k31compile import notes
from k31compile.leaves import known
from k31compile.leaves.known import KNOWN


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """Fresh compiler state, no knowledge of an earlier test, and every sentence is told again."""
    (tmp_path / "functions").mkdir(mode=0o700)
    monkeypatch.setattr(known, "_folder", lambda: tmp_path / "functions")
    monkeypatch.setattr(notes, "_logged", set())
    torch._dynamo.reset()
    KNOWN.forget()
    yield
    KNOWN.forget()


@pytest.fixture
def tokens():
    def draw(batch=2, length=5, dtype=torch.float32, seed=0):
        return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return draw


@pytest.fixture
def compiled():
    def compile_it(model, **how):
        options = {"codegen": "ops", **how.pop("options", {})}
        return torch.compile(model, backend="k31", options=options, **how)

    return compile_it


@pytest.fixture
def fused():
    return lambda: dict(k31compile.last_report().fused)
