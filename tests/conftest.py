"""What the tests of several folders share."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

_CACHE_DIR = os.environ.get("K31_CACHE_DIR")


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A store of compiled graphs for each test: what an earlier one kept would be found, and nothing be compiled.

    A test that sets K31_CACHE_DIR has its own already.
    """
    if "torch" not in sys.modules:
        return  # nothing is compiled where torch must not be imported
    from k31compile.cache import opened
    from k31compile.cache.entry_store import EntryStore, default_store

    made: list[EntryStore] = []

    def store() -> EntryStore:
        if os.environ.get("K31_CACHE_DIR") != _CACHE_DIR:
            return default_store()
        if not made:
            made.append(EntryStore(tmp_path_factory.mktemp("store")))
        return made[0]

    monkeypatch.setattr(opened, "default_store", store)


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


@pytest.fixture(autouse=True)
def _no_confirmations_of_other_tests(monkeypatch, tmp_path):
    """What this process remembers of regions lies in a folder of this test: another may have changed how we confirm."""

    def folder() -> Path:
        path = tmp_path / "regions"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    monkeypatch.setattr("k31compile.graph.memory._folder", folder)
