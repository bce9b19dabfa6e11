"""A small file is believed for its signature and its owner alone; every other is refused with reason and remedy."""

import os
import stat
from pathlib import Path

import pytest

from k31compile.errors import StoreError
from k31compile.signed_file import MOST_BYTES, bodies, keep_newest, private_folder, read_signed, write_signed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path))
    return private_folder("things")


def test_what_was_written_is_read(folder: Path) -> None:
    assert read_signed(folder / "a.signed") is None
    write_signed(folder / "a.signed", b"one\ntwo")
    assert read_signed(folder / "a.signed") == b"one\ntwo"
    assert stat.S_IMODE((folder / "a.signed").stat().st_mode) == 0o600
    assert list(bodies(folder, "*.signed")) == [("a.signed", b"one\ntwo")]
    with pytest.raises(StoreError, match="more than the"):
        write_signed(folder / "b.signed", b"x" * (MOST_BYTES + 1))


def change(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] = ord("0") if data[place] != ord("0") else ord("1")
    path.write_bytes(data)


def link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def other_key(path: Path) -> None:
    (path.parents[1] / "signing.key").write_bytes(b"1" * 32)


DAMAGE = {
    "changed in the body": (lambda p: change(p, -1), "is not as this user's key has signed it"),
    "changed in the signature": (lambda p: change(p, 3), "is not as this user's key has signed it"),
    "shortened": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "is not as this user's key has signed it"),
    "lengthened": (lambda p: p.write_bytes(p.read_bytes() + b"\n"), "is not as this user's key has signed it"),
    "of another key": (other_key, "is not as this user's key has signed it"),
    "empty": (lambda p: p.write_bytes(b""), "carries no signature"),
    "without a signature": (lambda p: p.write_bytes(b'{"a": 1}\n'), "carries no signature"),
    "open to the group": (lambda p: p.chmod(0o660), r"can be written by others \(mode 0660\)"),
    "a link": (link, "is a symbolic link"),
    "a pipe": (fifo, "is no plain file"),
    "too large": (lambda p: p.write_bytes(b"a\n" + b"x" * (MOST_BYTES + 200)), "is larger than"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_believed_is_refused_with_a_remedy(name: str, folder: Path) -> None:
    path = folder / "a.signed"
    write_signed(path, b"body")
    damage, reason = DAMAGE[name]
    damage(path)
    with pytest.raises(StoreError, match=reason) as caught:
        read_signed(path)
    assert f"rm {path}" in str(caught.value)
    ((_, listed),) = bodies(folder, "a.signed")
    assert isinstance(listed, StoreError)


def test_a_file_of_somebody_else_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_signed(folder / "a.signed", b"body")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="belongs to user"):
        read_signed(folder / "a.signed")


def test_a_broken_file_is_replaced_and_never_written_through(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.write_bytes(b"precious")
    (folder / "a.signed").symlink_to(elsewhere)
    write_signed(folder / "a.signed", b"body")
    assert elsewhere.read_bytes() == b"precious"
    assert read_signed(folder / "a.signed") == b"body"


def test_a_folder_that_others_could_fill_is_refused(folder: Path) -> None:
    folder.chmod(0o770)
    with pytest.raises(StoreError, match="can be written by others"):
        private_folder("things")
    folder.chmod(0o700)
    folder.rename(folder.with_name("away"))
    folder.symlink_to("away")
    with pytest.raises(StoreError, match="is no folder of its own"):
        private_folder("things")


def test_the_newest_stay_within_count_and_bytes(folder: Path) -> None:
    for i in range(5):
        (folder / f"{i}.signed").write_bytes(b"x" * 100)
        os.utime(folder / f"{i}.signed", (i, i))
    (folder / "not.ours").write_bytes(b"x" * 1000)
    keep_newest(folder, "*.signed", 4, 1000)
    assert sorted(path.name for path in folder.iterdir()) == [*(f"{i}.signed" for i in range(1, 5)), "not.ours"]
    keep_newest(folder, "*.signed", 4, 250)
    assert sorted(path.name for path in folder.iterdir()) == ["3.signed", "4.signed", "not.ours"]
