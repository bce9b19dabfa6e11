"""Our folder: the user's own, closed to others, and files in it whole or not there."""

import os
import stat
from pathlib import Path

import pytest

from k31compile.errors import StoreError
from k31compile.store import atomic_write, cache_dir, check_private, sha256_of


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_chosen_folder_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "a" / "b"))
    old = os.umask(0)
    try:
        assert cache_dir() == cache_dir() == tmp_path / "a" / "b"
    finally:
        os.umask(old)
    assert mode_of(tmp_path / "a" / "b") == 0o700


def test_the_default_lies_with_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K31_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "k31compile"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "k31compile"


def test_a_folder_open_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "open"))
    cache_dir().chmod(0o777)
    with pytest.raises(StoreError, match=r"can be written by others \(mode 0777\).*chmod go-w"):
        cache_dir()
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be made"):
        cache_dir()


def test_what_belongs_to_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_private(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="belongs to user"):
        check_private(tmp_path)
    with pytest.raises(StoreError, match="cannot be read"):
        check_private(tmp_path / "missing")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "entry"
    atomic_write(target, b"first")
    assert target.read_bytes() == b"first"
    assert mode_of(target) == 0o600
    assert sha256_of(target) == "a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e"

    def fail(_descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(target, b"second")
    assert target.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [target]
