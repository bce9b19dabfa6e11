"""k31 cache export and import, from outside: exit codes, lines, JSON, and what helps where the secret is missing."""

import pytest

from k31compile.cache.entry_store import default_store

ONE, TWO = "3f2a" * 16, "77aa" * 16


@pytest.fixture
def filled(tmp_path, monkeypatch):
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("K31_CACHE_KEY", "a secret of two machines")
    store = default_store()
    for key in (ONE, TWO):
        store.publish(key, "native", {"torch": "2.13.0", "inputs": key}, {}, {}, {"graph.txt": b"graph"})
    return store


def test_there_and_back(filled, k31, k31_json, tmp_path, monkeypatch):
    bundle = tmp_path / "b.k31bundle"
    code, data = k31_json("cache", "export", str(bundle))
    assert code == 0
    assert data["entries"] == [ONE, TWO]
    assert data["bytes"] == bundle.stat().st_size
    code, out, _ = k31("cache", "export", str(tmp_path / "one"), ONE[:8])
    assert code == 0
    assert "signed with K31_CACHE_KEY\nentries: 1\n" in out
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "other"))
    code, out, _ = k31("cache", "import", str(bundle))
    assert code == 0
    assert "its signature is right\nentries: 2 new, 0 here already\n" in out
    assert "2 entries are for another 'torch' than this machine has: they are kept and not found here" in out
    code, data = k31_json("cache", "import", str(bundle))
    assert code == 0
    assert data["entries"] == {"new": [], "present": [ONE, TWO]}
    assert data["elsewhere"] == {"torch": 2}
    assert k31("cache", "verify")[:2] == (0, "2 entries checked, 0 broken\n")


def test_what_is_wrong_is_one_line(filled, k31, k31_json, tmp_path, monkeypatch):
    bundle = tmp_path / "b.k31bundle"
    code, _, err = k31("cache", "export", str(bundle), "0123456789")
    assert (code, err.count("\n")) == (1, 1)
    assert "K31-0506: no entry of the cache has the key '0123456789'" in err
    assert k31("cache", "export", str(bundle))[0] == 0
    monkeypatch.delenv("K31_CACHE_KEY")
    for command in (("import", str(bundle)), ("export", str(tmp_path / "none"))):
        code, _, err = k31("cache", *command)
        assert (code, err.count("\n")) == (1, 1)
        assert "K31-0501: K31_CACHE_KEY is not set" in err
        assert "set K31_CACHE_KEY to the same secret of at least 16 characters on both machines" in err
    code, data = k31_json("cache", "import", str(bundle))
    assert (code, data["error"]["code"]) == (1, "K31-0501")
