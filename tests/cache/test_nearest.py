"""Why a key was not found: the entry that comes nearest, and where it differs."""

import pytest
from store_cases import INGREDIENTS, KEY, OTHER, put

from k31compile.cache import entry_store
from k31compile.cache.nearest import describe, difference


def test_the_entry_with_the_fewest_differences(store):
    put(store, KEY, INGREDIENTS | {"graph": "cd" * 32, "torch": "2.12.0"})
    put(store, OTHER, INGREDIENTS | {"inputs": "t0 [1,48] float32\nt1 [4] int64"})
    nearest = store.nearest(INGREDIENTS)
    assert (nearest.key, set(nearest.differing)) == (OTHER, {"inputs"})
    said = f"nearest entry {OTHER[:12]}: inputs differ (t0 [1,48] float32 there, [1,64] float32 here)"
    assert store.why_missed(INGREDIENTS) == said
    assert store.nearest(INGREDIENTS, without=OTHER).key == KEY
    assert "graph differ, torch differ (2.12.0 there, 2.13.0 here)" in store.nearest(INGREDIENTS, OTHER).sentence()


def test_of_equals_the_one_used_last(store):
    put(store, KEY, INGREDIENTS | {"torch": "1"})
    put(store, OTHER, INGREDIENTS | {"torch": "2"})
    store.find(KEY)
    assert store.nearest(INGREDIENTS).key == KEY


def test_a_name_on_one_side_only_counts(store):
    put(store, KEY, {name: text for name, text in INGREDIENTS.items() if name != "torch"})
    assert store.why_missed(INGREDIENTS).endswith("torch is missing there and is here")
    assert difference({"a": "1"}, {"b": "1"}) == {"a": ("1", ""), "b": ("", "1")}


def test_another_kind_of_thing_is_no_neighbour(store):
    put(store, KEY, {"built from": "ab" * 16})
    assert store.why_missed(INGREDIENTS) == "the cache has no entry yet"


def test_an_entry_that_cannot_be_believed_is_no_neighbour(store):
    (put(store) / "signature").write_text("0" * 64)
    assert store.nearest(INGREDIENTS) is None


def test_a_store_that_cannot_be_read_is_a_sentence(store):
    put(store)
    store.root.chmod(0o777)
    assert store.why_missed(INGREDIENTS).startswith("the cache cannot be read: K31-0501: can be written by others")


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ("ab" * 32, "cd" * 32, "x differ"),
        ("1", "4", "x differ (1 there, 4 here)"),
        ("a\nb 1\nc", "a\nb 2\nc", "x differ (b 1 there, 2 here)"),
        ('{"a": 1, "strict": false}', '{"a": 1, "strict": true}', "x differ (strict false there, true here)"),
        ('{"a": 1}', '{"a": 1 }', 'x differ ({"a": 1} there, {"a": 1 } here)'),
        ("[1, 2]", "[1, 3]", "x differ ([1, 2] there, [1, 3] here)"),
        ("a\nb", "a", "x differ (b there, nothing more here)"),
        ("a", "a\nb", "x differ (nothing more there, b here)"),
        ("y" * 99, "z", f"x differ ({'y' * 57}... there, z here)"),
    ],
)
def test_a_difference_is_its_first_place(there, here, said):
    assert describe("x", there, here) == said


def test_many_differences_are_counted(store):
    put(store, KEY, {f"i{number}": "1" for number in range(9)})
    assert store.why_missed({f"i{number}": "2" for number in range(9)}).endswith(
        "i3 differ (1 there, 2 here) and 5 more"
    )


def test_in_a_large_cache_only_the_last_used_are_read(store, monkeypatch):
    for number in range(8):
        put(store, f"{number:064x}", INGREDIENTS | {"torch": str(number)})
    read = []
    real = entry_store.read_manifest
    monkeypatch.setattr(entry_store, "MOST_COMPARED", 3)
    monkeypatch.setattr(
        entry_store, "read_manifest", lambda folder, keys: read.append(folder.name) or real(folder, keys)
    )
    assert store.nearest(INGREDIENTS).key == f"{7:064x}"
    assert read == [f"{number:064x}" for number in (7, 6, 5)]
