"""`k31 cache why TARGET` and --require-warm: what the cache lacks, and for which ingredient; nothing is compiled."""

import os

import pytest

from k31compile.cache.entry_store import default_store
from k31compile.cli import warm_run
from k31compile.cli.console import errors
from k31compile.cli.require_warm import nothing_compiled
from k31compile.cli.warm_run import Job, Warmed
from k31compile.errors import K31Error

KEY = "3f2a" * 16
COLD = "this graph is not in the cache: nearest entry 77aa77aa77aa: threads differ (2 there, 4 here)"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Plans that were looked up; each finds the entry `warm`, and `cold` not."""
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.delenv("K31_CACHE_KEY", raising=False)
    plans = []

    def run_plan(plan, check, say, beat):
        assert check, "nothing may be compiled"
        plans.append(plan)
        warm = Job(plan.specs[0], "warm", {}, "found", result={"keys": [KEY]})
        jobs = [warm, Job(plan.specs[0], "cold", {}, "cold", COLD, result={"keys": ["77" * 32]})]
        if plan.specs[0].target.endswith(":fails"):
            jobs[1] = Job(plan.specs[0], "cold", {}, "failed", error=K31Error("no weights").to_dict())
        return Warmed(jobs, 1.0, {}, 1)

    monkeypatch.setattr(warm_run, "run_plan", run_plan)
    return plans


def test_why_asks_for_a_target_as_it_is_now(asked, k31, k31_json, tmp_path):
    code, out, _ = k31("cache", "why", "model.py:entries")
    assert (code, out) == (0, f"warm: in the cache: {KEY[:12]}\ncold: {COLD}\n")
    code, data = k31_json("cache", "why", "model.py:entries")
    assert (code, data["target"]) == (0, "model.py:entries")
    assert [(one["entry"], one["state"], one["why"]) for one in data["entries"]] == [
        ("warm", "found", ""),
        ("cold", "cold", COLD),
    ]
    code, out, _ = k31("cache", "why", "model.py:fails")
    assert (code, out.splitlines()[1]) == (1, "cold: no weights")
    assert k31("cache", "why", "model.py:entries", "--cache", str(tmp_path))[0] == 0
    assert dict(asked[-1].specs[0].options) == {"cache": str(tmp_path)}
    code, _, err = k31("cache", "why", "model.py:entries", "3f2a")
    assert (code, err) == (
        2,
        "K31-0103: model.py:entries is no key, and only a key is compared with 3f2a; k31 cache ls lists keys\n",
    )


def test_compile_asks_the_cache_and_makes_nothing(asked, k31, k31_json, tmp_path):
    code, _, err = k31("compile", "model.py:entries", "--require-warm", "--threads", "3", "--dtype", "bf16")
    assert (code, err) == (1, f"K31-0504: {COLD} (entry 'cold'); warm the cache with `k31 cache warm`\n")
    assert (asked[-1].threads, asked[-1].specs[0].dtype) == (3, "bf16")
    code, data = k31_json("compile", "model.py:entries", "--require-warm")
    assert (code, data["error"]["code"], data["error"]["what"]) == (1, "K31-0504", COLD)
    code, data = k31_json("compile", "model.py:entries", "--require-warm", "--entry", "warm")
    assert (code, [one["keys"] for one in data["entries"]]) == (0, [[KEY]])
    code, _, err = k31("compile", "model.py:entries", "--require-warm", "--entry", "none")
    assert (code, "the target has no entry 'none'; entries: warm, cold" in err) == (2, True)
    code, _, err = k31("compile", "model.py:fails", "--require-warm")
    assert (code, "no weights" in err) == (1, True)
    for extra in (("-o", str(tmp_path / "f.k31")), ("--offline",)):
        code, _, err = k31("compile", "model.py:entries", "--require-warm", *extra)
        assert (code, "--require-warm makes nothing" in err) == (2, True)
    assert k31("compile", "model.py:entries")[0] == 2


def test_nothing_is_compiled_while_it_is_not_wanted(monkeypatch):
    monkeypatch.delenv("K31_REQUIRE_WARM", raising=False)
    with nothing_compiled(False):
        assert "K31_REQUIRE_WARM" not in os.environ
    with nothing_compiled(True):
        assert os.environ["K31_REQUIRE_WARM"] == "1"
    assert "K31_REQUIRE_WARM" not in os.environ


def test_a_real_target_in_an_empty_cache(tmp_path, k31, monkeypatch, small):
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "user"))
    code, out, _ = k31("cache", "why", f"{small}:entry")
    assert (code, out) == (0, "small: this graph is not in the cache: the cache has no entry yet\n")
    assert default_store().listed() == []


def test_a_name_between_colons_is_no_picture(capsys):
    errors().print("m.py:one: starting", markup=False)
    assert capsys.readouterr().err == "m.py:one: starting\n"
