"""What others may have written is refused with the reason and the remedy, whatever it holds."""

import os
import shutil
import warnings

import pytest
from store_cases import KEY, OTHER, left_over, put

from k31compile.cache import verify
from k31compile.cache.entry_store import EntryStore
from k31compile.cache.scratch import machine_tag
from k31compile.errors import StoreError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
FORBIDDEN = "a file was opened before its owner was known"


def refused(store, reason):
    with pytest.warns(UserWarning, match=reason) as told:
        assert store.find(KEY) is None
    assert len(told) == 1
    assert KEY[:12] in str(told[0].message)


@needs_root
@pytest.mark.parametrize("name", ["", "manifest.json", "signature", "library.so"])
def test_what_belongs_to_somebody_else(store, name):
    folder = put(store)
    os.chown(folder / name, 12345, -1)
    refused(store, r"belongs to user 12345, not to this user \(0\); let user 12345 export it and import it here")
    assert (folder / name).exists()
    if not name:
        with pytest.warns(UserWarning, match=r"was not kept: .* its name is taken: it belongs to user 12345"):
            assert put(store) is None
        assert folder.exists()


def test_what_belongs_to_somebody_else_as_seen_from_there(store, monkeypatch):
    put(store)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(UserWarning, match="belongs to user"):
        assert store.find(KEY) is None


@pytest.mark.parametrize("name", ["", "manifest.json", "signature", "library.so"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write(store, name, mode):
    folder = put(store)
    path = folder / name
    path.chmod(path.stat().st_mode | mode)
    refused(store, r"can be written by others \(mode 0\d+\); run: chmod go-w ")
    assert folder.exists()
    path.chmod(path.stat().st_mode & ~0o022)
    assert store.find(KEY) is not None


def test_writing_replaces_what_others_could_write(store):
    put(store).chmod(0o770)
    with pytest.warns(UserWarning, match="set aside: it can be written by others"):
        assert put(store) is not None
    assert store.find(KEY) is not None


@pytest.mark.parametrize("name", ["manifest.json", "signature", "library.so"])
def test_a_link_in_the_place_of_a_file(store, tmp_path, name):
    path = put(store) / name
    shutil.move(path, tmp_path / "real")
    path.symlink_to(tmp_path / "real")
    refused(store, rf"its file '{name}' is a symbolic link; run: rm {path}")


def test_a_link_in_the_place_of_an_entry(store, tmp_path):
    folder = put(store)
    shutil.move(folder, tmp_path / KEY)
    folder.symlink_to(tmp_path / KEY)
    refused(store, f"it is a symbolic link; run: rm {folder}")
    with pytest.warns(UserWarning, match="set aside: it is a symbolic link"):
        assert put(store) == folder
    assert store.find(KEY) is not None
    assert not folder.is_symlink()
    assert (tmp_path / KEY / "library.so").exists()


@pytest.mark.parametrize("name", ["manifest.json", "library.so"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(store, name):
    path = put(store) / name
    path.unlink()
    os.mkfifo(path)
    refused(store, "is neither a plain file nor a folder")


def test_an_entry_without_a_signature_of_ours(store, tmp_path, monkeypatch):
    put(store)
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "another user"))
    refused(store, r"its signature fits neither this user's key nor K31_CACHE_KEY.*; set K31_CACHE_KEY as it was when")


def test_a_manifest_is_not_even_parsed_before_it_is_believed(store, monkeypatch):
    (put(store) / "signature").write_text("0" * 64)
    monkeypatch.setattr(verify, "parse", lambda data: pytest.fail("parsed"))
    refused(store, "its signature fits neither")


def test_nothing_of_somebody_elses_is_opened(store, monkeypatch):
    folder = put(store)
    (folder / "library.so").chmod(0o666)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(str(path)) or real(path, *rest, **more))
    refused(store, "can be written by others")
    assert not any(path.endswith("library.so") for path in opened), FORBIDDEN
    assert "manifest.json" in opened


@pytest.mark.parametrize("part", ["", "entries", "making"])
def test_a_store_that_others_can_write_is_not_used(store, part):
    put(store)
    place = store.root / part
    place.chmod(0o777)
    with pytest.warns(
        UserWarning, match=r"the cache is not used: .*can be written by others \(mode 0777\).*chmod go-w"
    ):
        assert store.find(KEY) is None
    with pytest.warns(UserWarning, match=r"was not kept: .*chmod go-w"):
        assert put(store, OTHER) is None
    for command in (store.listed, store.verify, store.gc, store.clear):
        with pytest.raises(StoreError, match="can be written by others"):
            command()
    assert (store.root / "entries" / KEY / "library.so").exists()


def test_a_link_in_the_place_of_the_entries(store, tmp_path):
    put(store)
    shutil.move(store.root / "entries", tmp_path / "moved")
    (store.root / "entries").symlink_to(tmp_path / "moved")
    with pytest.warns(UserWarning, match="the cache is not used: .*is not a folder of the cache"):
        assert store.find(KEY) is None
    with pytest.raises(StoreError, match=r"move .*entries away"):
        store.clear()
    assert (tmp_path / "moved" / KEY / "library.so").exists()


def test_the_folder_itself_may_be_a_link_of_the_user(store, tmp_path):
    put(store)
    (tmp_path / "link").symlink_to(store.root)
    assert EntryStore(tmp_path / "link").find(KEY) is not None


def test_clearing_removes_what_was_made_and_nothing_else(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "library.so").write_text("theirs")
    folder = put(store)
    put(store, OTHER)
    foreign = [store.root / "notes.txt", store.root / "entries" / "notes.txt", folder / "notes.txt"]
    for path in foreign:
        path.write_text("mine")
    (store.root / "entries" / ("ab" * 32)).symlink_to(outside)
    (folder / "link.so").symlink_to(outside / "library.so")
    (folder / "sub").mkdir()
    (folder / "sub" / "library.so").write_text("mine")
    removed = store.clear()
    assert removed.keys == [OTHER]
    assert removed.bytes > 0
    assert {path.removeprefix(f"{store.root}/entries/") for path in removed.kept} == {
        "ab" * 32,
        f"{KEY}/notes.txt",
        f"{KEY}/link.so",
        f"{KEY}/sub",
    }
    assert all(path.read_text() == "mine" for path in [*foreign, folder / "sub" / "library.so"])
    assert (outside / "library.so").read_text() == "theirs"
    assert sorted(path.name for path in folder.iterdir()) == ["link.so", "notes.txt", "sub"]
    with pytest.warns(UserWarning, match="set aside"):
        assert store.find(KEY) is None


@needs_root
def test_clearing_leaves_what_belongs_to_somebody_else(store):
    folder = put(store)
    os.chown(folder, 12345, -1)
    assert list(store.clear().kept) == [str(folder)]
    assert (folder / "library.so").exists()


@needs_root
def test_what_another_user_left_half_made_stays(store):
    put(store)
    folder = store.places.making / f"new.{machine_tag()}.{2**22 + 1}.17.abcdef"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    store.gc()
    assert folder.exists()


def test_clearing_takes_what_was_set_aside_and_what_cannot_be_read(store):
    (put(store) / "manifest.json").write_text("{")
    put(store, OTHER)
    (store.root / "entries" / OTHER / "signature").unlink()
    with pytest.warns(UserWarning, match="set aside"):
        store.find(KEY)
    assert store.clear().kept == {}
    assert left_over(store) == []
    assert store.places.entry_keys() == []


def test_a_sound_entry_warns_nobody(store):
    put(store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.find(KEY) is not None
