"""Commands run in this process where they may, and in one of their own where the environment matters."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k31compile.cli import app

SMALL = '''
"""A small model with an indexer and a sparse attention, in the words of an author."""
import torch
from k31compile import Entry


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.index = torch.nn.Linear(24, 8 * 16)
        self.index_key = torch.nn.Linear(24, 16)
        self.weight = torch.nn.Linear(24, 8)
        self.query, self.key, self.value = (torch.nn.Linear(24, size) for size in (3 * 16, 16, 20))

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.index(x).view(batch, length, 8, 16)
        scores = (self.weight(x).unsqueeze(-1) * torch.einsum("bthd,bsd->bths", q, self.index_key(x)).relu()).sum(2)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        chosen = scores.masked_fill(future, float("-inf")).topk(5, dim=-1).indices
        mask = torch.zeros_like(future).expand(batch, -1, -1).scatter(-1, chosen, True) & ~future
        logits = torch.einsum("bthd,bsd->bths", self.query(x).view(batch, length, 3, 16), self.key(x)) * 0.25
        logits = logits.masked_fill(~mask.unsqueeze(2), float("-inf"))
        return torch.einsum("bths,bsd->bthd", logits.softmax(-1), self.value(x))


def entry():
    return Entry("small", Small().eval(), (torch.randn(2, 19, 24, generator=torch.Generator().manual_seed(1)),))


def entries():
    return [entry()]


def model_alone():
    return Small()


def with_arguments():
    return Small(), (torch.randn(2, 19, 24),)


def ill_called():
    return Entry("ill", Small(), (torch.randn(2, 19, 23),))


def nothing():
    return []


def number():
    return 3


def crash():
    raise ValueError("no weights")


not_callable = 5
'''


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Return the path of a file with factories."""
    path = tmp_path / "small_model.py"
    path.write_text(SMALL)
    return str(path)


@pytest.fixture
def k31(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command line here: exit code, standard output, standard error."""

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = app.run(list(argv))
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err
        return code, captured.out, captured.err

    return call


@pytest.fixture
def k31_json(k31: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Return a function that runs a command line with --json: exit code and the document."""

    def call(*argv: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = k31(*argv, "--json")
        return code, json.loads(out)

    return call


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command in a process of its own, as a user does, away from a terminal."""

    def call(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "k31compile", *argv]
        plain = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
        return subprocess.run(
            command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False, timeout=300
        )

    return call
