"""What tests of several folders share."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def transformers_model(monkeypatch) -> Callable[[str], ModuleType]:
    """transformers_model("kimi_linear"): that model's module, or the test is skipped.

    transformers asks for a package `kernels`, and the root of this repository holds a link of that name, which
    `python -m pytest` puts in the way.
    """
    root = Path(__file__).parents[1]
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry or ".").resolve() != root])
    pytest.importorskip("transformers")
    return lambda name: importlib.import_module(f"transformers.models.{name}.modeling_{name}")
