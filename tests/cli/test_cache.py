"""k31 cache: what lies in it, whether it is sound, and what is removed, from outside."""

import json
import os
import time
from pathlib import Path

import pytest

from k31compile.cache.entry_store import default_store
from k31compile.cache.opened import open_store
from k31compile.cli.readable import age_text, size_text

ONE, TWO, THREE = "3f2a" * 16, "3f77" * 16, "77aa" * 16


def put(store, key, inputs, torch="2.13.0"):
    ingredients = {"inputs": inputs, "torch": torch}
    return store.publish(key, "native", ingredients, {}, {}, {"graph.txt": b"graph", "library.so": b"x" * 5000})


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.delenv("K31_CACHE_KEY", raising=False)
    return default_store()


@pytest.fixture
def filled(store):
    put(store, ONE, "t0 [1,48]")
    put(store, TWO, "t0 [1,64]")
    put(store, THREE, "t0 [1,64]", torch="2.12.0")
    return store


def test_an_empty_cache(store, k31, k31_json):
    assert k31("cache", "ls") == (0, f"0 entries, 0 B in {store.root}\n", "")
    code, data = k31_json("cache", "stat")
    assert (code, data["entries"], data["bytes"], data["kinds"]) == (0, 0, 0, {})
    assert k31("cache", "verify")[:2] == (0, "0 entries checked, 0 broken\n")
    assert k31("cache", "clear")[:2] == (0, "0 entries removed, 0 B; 0 left\n")
    assert not store.root.exists()


def test_ls_shows_what_was_used_last_first(filled, k31, k31_json):
    filled.find(ONE)
    code, data = k31_json("cache", "ls")
    assert code == 0
    assert [row["key"] for row in data["entries"]] == [ONE, THREE, TWO]
    assert data["entries"][0]["files"] == ["graph.txt", "library.so"]
    assert abs(data["entries"][0]["used"] - time.time()) < 60
    code, out, _ = k31("cache", "ls")
    assert code == 0
    assert out.index(ONE[:12]) < out.index(THREE[:12]) < out.index(TWO[:12])
    assert f"3 entries, {size_text(sum(row['bytes'] for row in data['entries']))} in {filled.root}" in out


def test_stat_tells_the_bounds_and_the_key(filled, k31, k31_json, monkeypatch):
    monkeypatch.setenv("K31_CACHE_KEY", "a secret of two machines")
    monkeypatch.setenv("K31_CACHE_MAX_BYTES", "20M")
    code, data = k31_json("cache", "stat")
    assert code == 0
    assert (data["entries"], data["files"], data["max_bytes"]) == (3, 12, 20 << 20)
    assert (data["signed_with"], data["kinds"]) == ("K31_CACHE_KEY", {"native": 3})
    code, out, _ = k31("cache", "stat")
    assert "3 of at most 2000 (3 native)" in out
    assert "of at most 20.0 MiB in 12 files" in out


def test_why_compares_with_the_nearest_or_a_named_one(filled, k31, k31_json):
    code, data = k31_json("cache", "why", "3f2")
    assert (code, data["key"], data["nearest"]) == (0, ONE, TWO)
    assert data["differing"] == {"inputs": {"here": "t0 [1,48]", "there": "t0 [1,64]"}}
    code, data = k31_json("cache", "why", "3f2", "77")
    assert (code, data["nearest"], set(data["differing"])) == (0, THREE, {"inputs", "torch"})
    code, out, _ = k31("cache", "why", "3f2")
    assert f"{ONE[:12]} and {TWO[:12]} differ in 1:" in out
    assert "t0 [1,48]" in out
    filled.clear()
    put(filled, ONE, "t0 [1,48]")
    assert k31("cache", "why", "3f")[1] == f"{ONE[:12]} is the only entry\n"


def test_verify_names_the_broken_entry_and_ends_with_1(filled, k31, k31_json):
    assert k31("cache", "verify")[:2] == (0, "3 entries checked, 0 broken\n")
    (filled.root / "entries" / TWO / "library.so").write_bytes(b"y" * 5000)
    code, out, _ = k31("cache", "verify")
    assert code == 1
    assert f"{TWO[:12]}: the bytes of its file 'library.so' are not those that were written; it is built again" in out
    code, data = k31_json("cache", "verify")
    assert (code, data["checked"], list(data["broken"])) == (1, 3, [TWO])
    assert k31("cache", "verify", "3f2", "77")[0] == 0
    assert k31("cache", "verify", "3f7")[0] == 1


def test_gc_and_clear(filled, k31, k31_json, tmp_path):
    (filled.root / "entries" / ONE / "notes.txt").write_text("mine")
    os.utime(filled.root / "entries" / ONE, (1, 1))
    code, data = k31_json("cache", "gc", "--max-entries", "2")
    assert (code, data["removed"]) == (0, [TWO])
    assert data["kept"] == {str(filled.root / "entries" / ONE / "notes.txt"): "no part of the entry"}
    code, out, _ = k31("cache", "clear")
    assert code == 0
    assert "1 entries removed" in out
    assert f"left where it is: {filled.root / 'entries' / ONE / 'notes.txt'}: no part of the entry" in out
    assert (filled.root / "entries" / ONE / "notes.txt").read_text() == "mine"


def test_another_cache(filled, k31, k31_json, tmp_path):
    (tmp_path / "empty").mkdir()
    assert k31("cache", "ls", "--cache", str(tmp_path / "empty"))[1].startswith("0 entries")
    code, data = k31_json("cache", "ls", "--cache", str(filled.root))
    assert (code, len(data["entries"])) == (0, 3)


def test_push_gives_entries_to_other_machines(filled, k31, k31_json, tmp_path, monkeypatch):
    url = f"file://{tmp_path}/shelf"
    code, _, err = k31("cache", "push", url)
    assert code == 1
    assert "K31_CACHE_KEY is not set" in err
    monkeypatch.setenv("K31_CACHE_KEY", "a secret of two machines")
    code, data = k31_json("cache", "push", url, "3f2")
    assert (code, data["given"], data["left"]) == (0, [ONE], [])
    assert k31("cache", "push", url)[1] == "3 entries given, 0 not\n"
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "other"))
    assert open_store(url).find(TWO) is not None
    (tmp_path / "shelf" / "file").write_text("")
    with pytest.warns(UserWarning, match="is given nothing more by this process"):
        code, data = k31_json("cache", "push", f"{url}/file")
    assert (code, data["given"], data["left"]) == (1, [], [TWO])
    assert "failed when it was given entry" in data["why"]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("why", "99"), 2, "K31-0103: no entry's key begins with '99'; k31 cache ls lists them"),
        (("why", ""), 2, "K31-0103: no entry's key begins with ''"),
        (("why", "3f"), 2, f"K31-0103: 2 entries' keys begin with '3f'; give more digits: {ONE[:12]}, {TWO[:12]}"),
        (("verify", "no"), 2, "K31-0103: no entry's key begins with 'no'"),
        (("gc", "--max-bytes", "much"), 2, "K31-0101: --max-bytes does not take 'much'; it takes a whole number"),
        (("ls", "--cache", "nowhere"), 2, "K31-0103: there is no folder nowhere; give the folder of a cache"),
    ],
)
def test_wrong_calls_are_one_line(filled, k31, argv, code, says):
    ended, out, err = k31("cache", *argv)
    assert (ended, out) == (code, "")
    assert err.startswith(says)
    assert len(err.splitlines()) == 1


def test_an_entry_that_is_not_believed_is_listed_and_not_compared(filled, k31):
    (filled.root / "entries" / TWO / "signature").write_text("0" * 64)
    code, out, _ = k31("cache", "ls")
    assert code == 0
    assert "not believed" in out
    code, _, err = k31("cache", "why", "3f7")
    assert code == 2
    assert f"the entry {TWO[:12]} cannot be compared: its signature fits neither" in err


def test_a_cache_open_to_others_is_refused_with_the_remedy(filled, k31):
    filled.root.chmod(0o777)
    code, _, err = k31("cache", "ls")
    assert code == 1
    assert err == (f"K31-0501: can be written by others (mode 0777) ({filled.root}); run: chmod go-w {filled.root}\n")


def test_it_starts_without_torch(filled, process, monkeypatch):
    done = process("cache", "ls", "--json")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["entries"]) == 3
    assert Path(json.loads(done.stdout)["cache"]) == filled.root


def test_a_name_that_the_output_cannot_spell_is_escaped(filled, process, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    folder = tmp_path / "é"
    filled.root.rename(folder)
    done = process("cache", "ls", "--cache", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 entries" in done.stdout
    assert "\\xe9" in done.stdout


def test_sizes_and_ages_are_readable():
    assert [size_text(count) for count in (0, 999, 1000, 5 << 20, 250 << 20, 8 << 30)] == [
        "0 B",
        "999 B",
        "1.0 KiB",
        "5.0 MiB",
        "250 MiB",
        "8.0 GiB",
    ]
    assert [age_text(seconds) for seconds in (-5, 0, 3, 90, 7300, 86400 * 5.5)] == [
        "now",
        "now",
        "3 s",
        "1 min",
        "2 h",
        "5 d",
    ]


def test_what_was_learned_is_named_and_removed_only_when_asked(filled, k31, k31_json, tmp_path):
    user = tmp_path / "user"
    ours = {"regions": "ab" * 20 + ".signed", "functions": f"norm-{'cd' * 20}.signed"}
    for folder, name in ours.items():
        (user / folder).mkdir(mode=0o700)
        for each in (name, "notes.signed", f".{name}"):
            (user / folder / each).write_bytes(b"x" * 10)
    (user / "regions" / ("ef" * 20 + ".signed")).symlink_to(user / "regions" / "notes.signed")
    one = {"files": 1, "bytes": 10}
    assert k31_json("cache", "stat")[1]["learned"] == {"functions": one, "regions": one}
    assert k31_json("cache", "stat", "--cache", str(filled.root))[1]["learned"] == {}
    assert "learned      1 functions (10 B), 1 regions (10 B), kept beside the entries" in k31("cache", "stat")[1]
    out = k31("cache", "clear")[1]
    assert "3 entries removed" in out
    assert "learned: 1 functions (10 B), 1 regions (10 B) stay; --learned removes them" in out
    code, _, err = k31("cache", "clear", "--learned", "--cache", str(filled.root))
    assert (code, "--learned is of this user's own cache" in err) == (2, True)
    out = k31("cache", "clear", "--learned")[1]
    assert "learned: removed 1 functions (10 B), 1 regions (10 B)\n" in out
    assert k31_json("cache", "stat")[1]["learned"]["regions"] == {"files": 0, "bytes": 0}
    left = sorted(path.name for folder in ours for path in (user / folder).iterdir())
    assert left == sorted(["notes.signed"] * 2 + [f".{name}" for name in ours.values()] + ["ef" * 20 + ".signed"])
