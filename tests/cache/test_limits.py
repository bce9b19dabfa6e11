"""The bounds hold while entries come, the least recently used leave first, and far from them little is looked at."""

import os
import warnings

import pytest
from store_cases import KEY, child, ended, left_over, put

from k31compile.cache import limits as bounds
from k31compile.cache.entry_store import EntryStore
from k31compile.cache.limits import MOST_BROKEN, Limits
from k31compile.errors import OptionError


def key_of(number: int) -> str:
    return f"{number:064x}"


def on_disk(store) -> int:
    return sum(path.lstat().st_blocks * 512 for path in store.root.rglob("*") if path.is_file())


def test_two_hundred_small_variants_stay_within_fifty(tmp_path):
    store = EntryStore(tmp_path / "store", Limits(bytes=20 << 20, entries=50))
    for number in range(200):
        assert put(store, key_of(number)) is not None
        assert store.find(key_of(0)) is not None, "it was used just before"
        keys = store.places.entry_keys()
        assert len(keys) <= 50
        assert on_disk(store) <= 20 << 20
        assert all(len(os.listdir(store.root / "entries" / key)) <= 5 for key in keys[-1:])
    assert keys == [key_of(0), *(key_of(number) for number in range(151, 200))]
    assert left_over(store) == []


def test_bytes_are_bounded_before_an_entry_comes(tmp_path):
    store = EntryStore(tmp_path / "store", Limits(bytes=2 << 20, entries=50))
    for number in range(40):
        assert put(store, key_of(number), files={"library.so": os.urandom(150_000)}) is not None
        assert on_disk(store) <= 2 << 20
    keys = store.places.entry_keys()
    assert keys == [key_of(number) for number in range(40 - len(keys), 40)]
    assert len(keys) >= 11


def test_broken_ones_leave_before_sound_ones(tmp_path):
    store = EntryStore(tmp_path / "store", Limits(bytes=1 << 20))
    for number in range(5):
        put(store, key_of(number), files={"library.so": os.urandom(190_000)})
    with (store.root / "entries" / key_of(4) / "library.so").open("ab") as file:
        file.write(b"x")
    with pytest.warns(UserWarning, match="set aside"):
        store.find(key_of(4))
    assert len(left_over(store)) == 1
    put(store, key_of(5), files={"library.so": os.urandom(190_000)})
    assert left_over(store) == []
    assert store.places.entry_keys() == [key_of(number) for number in (0, 1, 2, 3, 5)]


def test_few_of_what_was_set_aside_are_kept(store):
    for _ in range(MOST_BROKEN + 5):
        (put(store) / "signature").write_bytes(b"")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store.find(KEY)
    assert len(left_over(store)) == MOST_BROKEN
    store.gc()
    assert left_over(store) == []


def test_far_from_the_bounds_nothing_is_looked_at(store, monkeypatch):
    put(store, key_of(0))
    monkeypatch.setattr(bounds, "scan", lambda places: pytest.fail("looked at every entry"))
    for number in range(1, 30):
        assert put(store, key_of(number)) is not None


@pytest.mark.parametrize("hint", [b"", b"x\n", b"-5\n", b"1\n" * 600, b"12", b"\xff" * 100])
def test_a_hint_that_cannot_be_read_is_counted_anew(tmp_path, hint):
    store = EntryStore(tmp_path / "store", Limits(bytes=1 << 20))
    for number in range(5):
        put(store, key_of(number), files={"library.so": os.urandom(190_000)})
    store.places.usage.write_bytes(hint)
    put(store, key_of(5), files={"library.so": os.urandom(190_000)})
    assert on_disk(store) <= 1 << 20


def test_a_hint_that_is_a_link_or_a_folder_is_not_followed(store, tmp_path):
    put(store)
    (tmp_path / "other").write_text("5\n")
    store.places.usage.unlink()
    store.places.usage.symlink_to(tmp_path / "other")
    put(store, key_of(1))
    assert (tmp_path / "other").read_text() == "5\n"
    store.places.usage.unlink()
    store.places.usage.mkdir()
    assert put(store, key_of(2)) is not None


def test_processes_that_write_at_once_stay_bounded(tmp_path):
    code = """
store = EntryStore(Path(sys.argv[1]), Limits(entries=20))
for number in range(30):
    assert put(store, f"{int(sys.argv[2]) * 1000 + number:064x}") is not None
"""
    store = EntryStore(tmp_path / "store", Limits(entries=20))
    for writer in [child(code, store.root, number) for number in range(4)]:
        ended(writer)
    assert len(store.places.entry_keys()) <= 20 + 3
    put(store)
    assert len(store.places.entry_keys()) <= 20
    assert set(store.verify().values()) == {""}
    assert left_over(store) == []


def test_gc_brings_a_store_under_smaller_bounds(store):
    for number in range(10):
        put(store, key_of(number))
    store.find(key_of(0))
    removed = store.gc(Limits(entries=2))
    assert removed.keys == [key_of(number) for number in range(1, 9)]
    assert store.places.entry_keys() == [key_of(0), key_of(9)]


def test_the_environment_decides(monkeypatch):
    assert (Limits().bytes, Limits().entries) == (8 << 30, 2000)
    monkeypatch.setenv("K31_CACHE_MAX_BYTES", "20M")
    monkeypatch.setenv("K31_CACHE_MAX_ENTRIES", "50")
    assert (Limits().bytes, Limits().entries) == (20 << 20, 50)
    for text in ("1073741824", "1G", "1GiB", "1gb", "1024 M"):
        monkeypatch.setenv("K31_CACHE_MAX_BYTES", text)
        assert Limits().bytes == 1 << 30
    for text in ("much", "-1", "0", "1.5G", "5 apples"):
        monkeypatch.setenv("K31_CACHE_MAX_BYTES", text)
        with pytest.raises(OptionError, match=f"K31_CACHE_MAX_BYTES does not take '{text}'; it takes a whole number"):
            Limits()
    with pytest.raises(OptionError, match="cannot be limited to 0 entries"):
        Limits(bytes=1, entries=0)
