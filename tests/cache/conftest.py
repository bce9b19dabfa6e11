"""A store and a signing key of its own for each test."""

import sys
from pathlib import Path

import pytest

from k31compile.cache.entry_store import EntryStore
from k31compile.cache.limits import Limits

sys.path.insert(0, str(Path(__file__).parent))  # store_cases


@pytest.fixture(autouse=True)
def _own_key(tmp_path, monkeypatch):
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "user"))
    for name in ("K31_CACHE_KEY", "K31_CACHE_MAX_BYTES", "K31_CACHE_MAX_ENTRIES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store(tmp_path: Path) -> EntryStore:
    return EntryStore(tmp_path / "store", Limits())
