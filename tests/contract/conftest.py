"""A stack of layers with an indexer and a sparse attention each, small enough to be compiled in a second or two."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from k31compile.report import clear_reports

STACK = Path(__file__).parent / "stack.py"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graph and no report of an earlier test; nothing of this one stays."""
    torch._dynamo.reset()
    clear_reports()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def stack() -> ModuleType:
    """The module with the model and its factories."""
    spec = importlib.util.spec_from_file_location("k31_contract_stack", STACK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
