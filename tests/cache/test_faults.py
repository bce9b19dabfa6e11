"""A disk that is full, cannot be written or fails in the middle: one warning, no entry, nothing left behind."""

import errno
import os
import resource
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from store_cases import FILES, INGREDIENTS, KEY, OTHER, child, ended, left_over, put

from k31compile.cache.entry_store import EntryStore
from k31compile.cache.limits import Limits

PUBLISH = """
warnings.simplefilter("always")
print(put(store, sys.argv[2], files={"library.so": os.urandom(int(sys.argv[3]))}))
print("found", store.find(KEY) is not None)
"""


def can_mount() -> bool:
    if os.geteuid() or not shutil.which("unshare"):
        return False
    with tempfile.TemporaryDirectory() as place:
        line = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", place]
        return subprocess.run(line, capture_output=True, check=False).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="this user cannot mount a small disk")


def mounted(script: str) -> tuple[str, ...]:
    """The head of a command that runs in a mount namespace of its own, after a script that mounts something there."""
    return ("unshare", "-m", "sh", "-ec", f'{script}; exec "$@"', "sh")


@needs_mount
def test_a_full_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    code = PUBLISH + "print(sorted(str(path.relative_to(store.root)) for path in store.root.rglob('*')))\n"
    head = mounted(f"mount -t tmpfs -o size=1m,mode=0700 tmpfs {place}")
    said = ended(child(code, place / "store", KEY, 3 << 20, before=head))
    assert said.count("UserWarning") == 1
    assert f"entry {KEY[:12]} was not kept: No space left on device" in said
    assert "None\nfound False\n['entries', 'making']" in said


@needs_mount
def test_a_disk_that_is_mounted_read_only(store):
    put(store)
    head = mounted(f"mount --bind {store.root} {store.root}; mount -o remount,ro,bind {store.root}")
    said = ended(child(PUBLISH, store.root, OTHER, 100, before=head))
    assert "None\nfound True" in said
    assert said.count("UserWarning") == 1
    assert f"entry {OTHER[:12]} was not kept: Read-only file system" in said
    assert left_over(store) == []


@needs_mount
def test_a_broken_entry_on_a_read_only_disk_is_a_miss(store):
    (put(store) / "library.so").write_bytes(b"")
    head = mounted(f"mount --bind {store.root} {store.root}; mount -o remount,ro,bind {store.root}")
    said = ended(child("print(store.find(KEY))", store.root, before=head))
    assert "None" in said
    assert f"entry {KEY[:12]} is broken" in said
    assert "cannot be set aside: Read-only file system" in said


def test_a_folder_that_this_user_may_not_write():
    # Root may write everywhere, so that it becomes somebody else for this.
    code = "os.geteuid() or os.setuid(65534)\n" + PUBLISH
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        if os.geteuid() == 0:
            os.chown(place, 65534, -1)
        os.chmod(place, 0o555)
        said = ended(child(code, Path(place) / "store", KEY, 100))
        assert "None\nfound False" in said
        assert f"entry {KEY[:12]} was not kept: Permission denied ({place}/store)" in said
        assert list(Path(place).iterdir()) == []


def test_a_limit_on_the_size_of_files(store):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    put(store, OTHER)
    said = ended(child(PUBLISH, store.root, KEY, 100_000, preexec_fn=limited))
    assert f"entry {KEY[:12]} was not kept: File too large" in said
    assert left_over(store) == []
    assert store.verify() == {OTHER: ""}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("step", ["fsync", "rename", "mkdir", "open", "write"])
def test_an_error_at_any_step_leaves_nothing(store, monkeypatch, step, number):
    put(store, OTHER)

    def fail(*_args, **_more):
        raise OSError(number, os.strerror(number))

    def fail_to_make(path, flags, *rest, **more):
        return fail() if flags & os.O_CREAT else os_open(path, flags, *rest, **more)

    os_open = os.open
    with monkeypatch.context() as patch:
        if step == "open":
            patch.setattr(os, "open", fail_to_make)
        elif step == "write":
            patch.setattr("k31compile.cache.publish._describe", fail)
        else:
            patch.setattr(os, step, fail)
        with pytest.warns(UserWarning, match=f"was not kept: {os.strerror(number)}") as told:
            assert put(store) is None
    assert len(told) == 1
    assert left_over(store) == []
    assert store.verify() == {OTHER: ""}
    assert put(store) is not None


def test_an_interrupt_leaves_nothing(store, monkeypatch):
    def interrupt(_handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(store)
    assert left_over(store) == []
    assert store.find(KEY) is None


def test_a_source_file_that_is_not_there(store, tmp_path):
    with pytest.warns(UserWarning, match=r"was not kept: No such file or directory \(.*missing.so\)"):
        assert put(store, files={"library.so": tmp_path / "missing.so"}) is None
    assert left_over(store) == []


def test_a_file_in_the_place_of_the_store(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(UserWarning, match="was not kept"):
        assert put(EntryStore(tmp_path / "file")) is None
    with pytest.warns(UserWarning, match="was not kept"):
        assert put(EntryStore(tmp_path / "file" / "below")) is None


def test_a_file_in_the_place_of_an_entry(store):
    put(store, OTHER)
    (store.root / "entries" / KEY).write_text("mine")
    with pytest.warns(UserWarning, match="is refused: it is neither a plain file nor a folder where one should be"):
        assert store.find(KEY) is None
    with pytest.warns(UserWarning, match="is set aside"):
        assert put(store) is not None
    assert store.find(KEY) is not None
    assert [(store.places.broken / name).read_text() for name in left_over(store)] == ["mine"]


def test_an_entry_larger_than_the_store(tmp_path):
    store = EntryStore(tmp_path / "store", Limits(bytes=20_000))
    with pytest.warns(UserWarning, match=r"the whole cache may have 20000 .*; raise K31_CACHE_MAX_BYTES"):
        assert put(store, files={"library.so": b"x" * 30_000}) is None
    assert left_over(store) == []


def test_a_clock_that_was_set_back(tmp_path, monkeypatch):
    store = EntryStore(tmp_path / "store", Limits(entries=3))
    keys = [f"{number:016x}" for number in range(9)]
    for key in keys[:3]:
        assert put(store, key) is not None
    now, seconds = time.time_ns, time.time
    monkeypatch.setattr(time, "time_ns", lambda: now() - 86400 * 10**9)
    monkeypatch.setattr(time, "time", lambda: seconds() - 86400)
    for place, key in enumerate(keys[3:], 3):
        folder = put(store, key)
        assert folder.stat().st_mtime == pytest.approx(time.time(), abs=60)
        assert store.find(key) is not None
        assert sorted(store.places.entry_keys()) == keys[place - 2 : place + 1]
    assert left_over(store) == []


def test_modes_do_not_depend_on_the_umask(store):
    old = os.umask(0)
    try:
        folder = put(store)
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert store.find(KEY).manifest["ingredients"] == INGREDIENTS
    assert set(store.find(KEY).manifest["files"]) == set(FILES)
