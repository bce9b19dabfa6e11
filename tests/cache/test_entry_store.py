"""What is put into a store comes out whole, or not at all and with a sentence."""

import json
import os
import stat
import warnings
from pathlib import Path

import pytest
from store_cases import FILES, INGREDIENTS, KEY, OTHER, PROGRAM, left_over, put

from k31compile.cache.entry_store import EntryStore
from k31compile.errors import StoreError

ALL_FILES = ("manifest.json", "signature", *FILES)


@pytest.fixture(autouse=True)
def _warnings_are_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_an_entry_comes_out_as_it_went_in(store):
    assert store.find(KEY) is None
    folder = put(store)
    assert folder == store.root / "entries" / KEY
    found = store.find(KEY)
    assert (found.key, found.folder) == (KEY, folder)
    assert {name: found.path(name).read_bytes() for name in FILES} == FILES
    assert (found.manifest["kind"], found.manifest["program"]) == ("native", PROGRAM)
    assert found.manifest["ingredients"] == INGREDIENTS
    assert left_over(store) == []
    for path in [store.root, folder, *folder.iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    with pytest.raises(StoreError, match=r"no file 'other.so'.*it has: graph.txt, library.so"):
        found.path("other.so")


def test_files_may_be_given_as_paths(store, tmp_path):
    (tmp_path / "made.so").write_bytes(FILES["library.so"])
    put(store, files={"library.so": tmp_path / "made.so"})
    assert store.find(KEY).path("library.so").read_bytes() == FILES["library.so"]


def test_a_manifest_is_the_same_wherever_it_is_made(store, tmp_path):
    other = EntryStore(tmp_path / "elsewhere" / "deeper")
    put(other)
    backwards = dict(reversed(INGREDIENTS.items()))
    store.publish(KEY, "native", backwards, PROGRAM, {"fused": {"short_conv": 2}}, dict(reversed(FILES.items())))
    one, two = (place.root / "entries" / KEY / "manifest.json" for place in (store, other))
    assert one.read_bytes() == two.read_bytes()
    assert str(tmp_path) not in one.read_text()


def test_the_first_writer_wins(store):
    put(store)
    assert put(store, files={"graph.txt": b"another"}) == store.root / "entries" / KEY
    assert store.find(KEY).path("graph.txt").read_bytes() == FILES["graph.txt"]
    assert left_over(store) == []


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "half":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    elif how == "longer":
        path.write_bytes(data + b"x")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["half", "empty", "flipped", "longer", "deleted"])
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_damaged_file_is_named_set_aside_and_healed(store, name, how):
    damage(put(store) / name, how)
    with pytest.warns(UserWarning, match=f"entry {KEY[:12]} is set aside: ") as told:
        assert store.find(KEY) is None
    assert len(told) == 1
    assert len(left_over(store)) == 1
    assert store.find(KEY) is None
    put(store)
    assert store.find(KEY).path("library.so").read_bytes() == FILES["library.so"]


@pytest.mark.parametrize("name", ALL_FILES)
def test_writing_over_a_damaged_entry_heals_it(store, name):
    damage(put(store) / name, "half")
    with pytest.warns(UserWarning, match=f"entry {KEY[:12]} is set aside"):
        put(store)
    assert store.find(KEY) is not None


def test_a_file_that_is_not_listed_is_refused(store):
    (put(store) / "helper.so").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"holds a file that its manifest does not list, 'helper.so'"):
        assert store.find(KEY) is None


def test_an_entry_under_another_name_is_refused(store):
    os.rename(put(store), store.root / "entries" / OTHER)
    with pytest.warns(UserWarning, match="its manifest is that of another entry"):
        assert store.find(OTHER) is None


def test_a_format_to_come_is_left_alone(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("k31compile.cache.manifest.FORMAT", 2)
        folder = put(store)
    with pytest.warns(UserWarning, match="format 2, this version reads 1"):
        assert store.find(KEY) is None
    assert folder.is_dir()


def test_what_no_store_takes_is_refused_before_anything_is_written(store):
    with pytest.raises(StoreError, match=r"cannot be called '\.\./x'"):
        put(store, files={"../x": b""})
    with pytest.raises(StoreError, match="cannot be called 'signature'"):
        put(store, files={"signature": b""})
    with pytest.raises(StoreError, match="takes 3 files and got 4"):
        put(store, files={f"f{number}": b"" for number in range(4)})
    with pytest.raises(StoreError, match="'program' of an entry is no plain JSON"):
        store.publish(KEY, "native", {}, {"f": print}, {}, {})
    with pytest.raises(StoreError, match="ingredient 'threads' of an entry is no text"):
        store.publish(KEY, "native", {"threads": 4}, {}, {}, {})
    for key in ("", "short", "../" * 8, "Z" * 64):
        with pytest.raises(StoreError, match="is no key of an entry"):
            store.find(key)
    assert not store.root.exists()


def test_signed_with_the_shared_key_it_travels(store, tmp_path, monkeypatch):
    monkeypatch.setenv("K31_CACHE_KEY", "a secret of two machines")
    put(store)
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "other machine"))
    assert store.find(KEY) is not None
    monkeypatch.setenv("K31_CACHE_KEY", "a secret of other machines")
    with pytest.warns(
        UserWarning, match=r"fits neither this user's key nor K31_CACHE_KEY.*set K31_CACHE_KEY as it was"
    ):
        assert store.find(KEY) is None


def test_what_was_kept_before_the_shared_key_came_still_serves(store, monkeypatch):
    put(store)
    monkeypatch.setenv("K31_CACHE_KEY", "a secret of two machines")
    assert store.find(KEY) is not None


def test_a_shared_key_too_short_is_told(store, monkeypatch):
    put(store)
    monkeypatch.setenv("K31_CACHE_KEY", "short")
    with pytest.warns(UserWarning, match="K31_CACHE_KEY has 5 characters and needs at least 16; make one with"):
        assert store.find(KEY) is None
    with pytest.warns(UserWarning, match="was not kept"):
        assert put(store, OTHER) is None


def test_entries_are_listed_and_checked(store):
    put(store)
    put(store, OTHER)
    store.find(KEY)
    assert [row.key for row in store.listed()] == [OTHER, KEY]
    (row,) = [row for row in store.listed() if row.key == KEY]
    assert (row.kind, row.fault) == ("native", "")
    assert row.bytes >= sum(map(len, FILES.values()))
    assert store.verify() == {KEY: "", OTHER: ""}
    damage(store.root / "entries" / OTHER / "library.so", "flipped")
    found = store.verify()
    assert found[KEY] == ""
    assert "the bytes of its file 'library.so' are not those that were written" in found[OTHER]
    assert (store.root / "entries" / OTHER).exists()


def test_a_store_that_is_not_there_is_empty(store):
    assert store.listed() == []
    assert store.verify() == {}
    assert store.clear().keys == store.gc().keys == []
    assert store.nearest(INGREDIENTS) is None
    assert store.why_missed(INGREDIENTS) == "the cache has no entry yet"
    assert not store.root.exists()


def test_the_manifest_is_plain_and_in_order(store):
    text = (put(store) / "manifest.json").read_text()
    manifest = json.loads(text)
    assert list(manifest) == sorted(manifest)
    assert manifest["files"]["graph.txt"]["bytes"] == len(FILES["graph.txt"])
    assert set(manifest) == {"format", "key", "kind", "ingredients", "files", "program", "report"}
