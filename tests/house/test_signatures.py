"""Keys: made once, this user's alone, and refused where they could be known to others."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from k31compile.errors import StoreError
from k31compile.signatures import has_shared_key, is_signed, local_key, shared_key, sign, signing_key, trusted_keys

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("K31_CACHE_KEY", raising=False)
    return tmp_path


def test_the_own_key_is_made_once_and_closed(folder: Path) -> None:
    assert trusted_keys() == []
    key = local_key()
    assert len(key) == 32
    assert local_key() == signing_key() == key
    assert trusted_keys() == [key]
    assert stat.S_IMODE((folder / "signing.key").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["signing.key"]


def test_processes_that_start_at_once_have_one_key(folder: Path) -> None:
    code = "from k31compile.signatures import local_key; print(local_key().hex())"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    racers = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(4)
    ]
    assert len({racer.communicate(timeout=120)[0] for racer in racers}) == 1


def test_the_shared_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_shared_key()
    with pytest.raises(StoreError, match=r"K31_CACHE_KEY is not set.*set K31_CACHE_KEY to the same secret"):
        shared_key()
    monkeypatch.setenv("K31_CACHE_KEY", "fifteen letters")
    with pytest.raises(StoreError, match="has 15 characters and needs at least 16"):
        shared_key()
    monkeypatch.setenv("K31_CACHE_KEY", "sixteen letters.")
    assert has_shared_key()
    assert shared_key() == signing_key()
    assert trusted_keys() == [shared_key()]
    own = local_key()
    assert trusted_keys() == [shared_key(), own]
    assert own != shared_key()


def test_a_signature_is_of_bytes_and_key() -> None:
    signature = sign(b"data", b"k" * 32)
    assert is_signed(b"data", signature, b"k" * 32)
    assert not is_signed(b"Data", signature, b"k" * 32)
    assert not is_signed(b"data", signature, b"K" * 32)
    assert not is_signed(b"data", signature + "\n", b"k" * 32)
    assert not is_signed(b"data", "\N{SNOWMAN}", b"k" * 32)


@pytest.mark.parametrize("harm", ["open", "short", "link", "folder"])
def test_a_key_that_cannot_be_relied_on_is_refused(folder: Path, harm: str) -> None:
    local_key()
    path = folder / "signing.key"
    if harm == "open":
        path.chmod(0o640)
    elif harm == "short":
        path.write_bytes(b"k")
    else:
        path.rename(folder / "moved")
        path.mkdir() if harm == "folder" else path.symlink_to("moved")
    with pytest.raises(StoreError, match=rf"signing key.*run: rm -r {path}"):
        local_key()
