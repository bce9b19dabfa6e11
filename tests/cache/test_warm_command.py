"""k31 cache warm: all of a k31.toml is in the cache afterwards, a second run finds it, and it is said all along."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k31compile.cli.warm_file import WarmSpec, read_plan
from k31compile.errors import WarmFileError

MODEL = """
import torch
from torch import nn
from k31compile import Entry


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, y):
        return self.second(self.first(x).relu()).softmax(-1) + y


def decode():
    bound = ("batch", 1, 8)
    print("a model that prints")
    drawn = torch.randn(3, 16), torch.randn(3, 16)
    return Entry("decode", Toy().eval(), drawn, dynamic={"0": {0: bound}, "1": {0: bound}})


def broken():
    def fail(x):
        raise ValueError("no weights")

    return Entry("broken", fail, (torch.randn(3),))


def dies():
    def die(x):
        import os
        os._exit(7)

    return Entry("dies", torch._dynamo.disable(die), (torch.randn(3),))
"""

PLAN = """
workers = 1

[[entries]]
target = "model.py:decode"
buckets = { batch = { max = 4, stride = 3 } }
"""


def plan_of(tmp_path: Path, text: str):
    path = tmp_path / "k31.toml"
    path.write_text(text)
    return read_plan(path)


def test_what_stands_beside_entries_is_for_all_of_them(tmp_path):
    plan = plan_of(
        tmp_path,
        """
        entries = ["tiny:decode", { target = "model.py:f", targets = ["cpu"], options = { fuse = [] }, layers = 3 }]
        threads = 2
        dtype = "bf16"
        options = { layout = "nd" }
        buckets = { batch = [4, 1] }
        """,
    )
    assert plan.folder == tmp_path
    assert plan.threads == 2
    assert plan.specs == (
        WarmSpec("tiny:decode", "", {"layout": "nd"}, {"batch": [1, 4]}, {}, "bf16"),
        WarmSpec("model.py:f", "cpu", {"layout": "nd", "fuse": []}, {"batch": [1, 4]}, {}, "bf16", 3),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "entries is missing .*it takes a list of TARGETs"),
        ("entries = []", r"entries is \[\]"),
        ("entry = 3", "the file has 'entry' .*did you mean 'entries'"),
        ("entries = [3]", r"entries\[0\] is 3 .*it takes a TARGET, or a table"),
        ("entries = [{ targte = 'x' }]", r"entries\[0\] has 'targte' .*did you mean 'target'"),
        ("entries = [{ dtype = 'bf16' }]", r"entries\[0\].target is missing"),
        ("entries = ['x']\nworkers = 0", "workers is 0 .*a whole number from 1 to 64"),
        ("entries = ['x']\nthreads = true", "threads is True"),
        ("entries = ['x']\ndtype = 'bf15'", r"entries\[0\].dtype is 'bf15' .*did you mean 'bf16'"),
        ("entries = ['x']\nbuckets = { batch = 3 }", r"entries\[0\]: buckets of 'batch' are 3 .*write a list"),
        ("entries = ['x']\nbuckets = { batch = { max = 3, strid = 1 } }", "buckets of 'batch' are"),
        ("entries = ['x']\nbuckets = 3", "buckets is 3 .*it takes a table"),
        ("entries = ['x']\noptions = { layuot = 'nd' }", "there is no option 'layuot' .*did you mean 'layout'"),
        ("entries = ['x']\noptions = { layout = 'dn' }", "option 'layout' does not take 'dn' .*'nd'"),
        ("entries = ['x']\noptions = { target = 'cpu' }", "options has 'target' .*write targets"),
        ("entries = ['x']\noptions = { cache = false }", "cannot be warmed"),
        ("entries = ['x']\ntargets = ['cpus']", "option 'target' does not take 'cpus' .*did you mean 'cpu'"),
        ("entries = ['x']\ntargets = 'cpu'", "targets is 'cpu' .*it takes a list"),
        ("entries = ['x']\nfill = { \"0\" = 'a' }", r"entries\[0\].fill.0 is 'a' .*a number"),
        ("entries = [", "is no TOML"),
    ],
)
def test_a_wrong_file_is_told_by_field_value_and_remedy(tmp_path, text, message):
    with pytest.raises(WarmFileError, match=message) as error:
        plan_of(tmp_path, text)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


def test_a_missing_file_says_how_to_write_one(tmp_path):
    with pytest.raises(WarmFileError, match=r"k31.toml cannot be read: No such file.*docs/warm.md"):
        read_plan(tmp_path / "k31.toml")


def run(tmp_path: Path, *argv: str, **more: str):
    """The command as a user runs it: exit code, output, lines of progress with the second each came at."""
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    # Without kernels of our own none are built with g++, which is not what is looked at here.
    environment |= {"K31_CACHE_DIR": str(tmp_path / "user"), "K31_CPU_KERNELS": "0", **more}
    command = [sys.executable, "-P", "-m", "k31compile", "cache", *argv]
    begin = time.monotonic()
    with (
        (tmp_path / "output").open("w+") as output,
        subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stderr is not None
        lines = [(time.monotonic() - begin, line.rstrip("\n")) for line in process.stderr]
        code = process.wait(timeout=300)
        wall = time.monotonic() - begin
        output.seek(0)
        return code, output.read(), lines, wall


def assert_phases_add_up(document, wall):
    named = {name: seconds for name, seconds in document["phases"].items() if name not in ("idle", "other")}
    assert abs(document["wall"] - wall) < 0.1 * wall
    assert abs(sum(document["phases"].values()) - wall) < 0.1 * wall
    assert sum(named.values()) > 0.8 * wall, "what has no name is a small part"
    for job in document["jobs"]:
        assert abs(sum(job["phases"].values()) - job["seconds"]) <= 0.1 * job["seconds"]


@pytest.mark.slow
def test_cold_then_warm_then_checked(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "k31.toml").write_text(PLAN)
    code, out, lines, _ = run(tmp_path, "warm", "--check")
    assert code == 1
    assert not list((tmp_path / "user").glob("graphs/entries/*")), "a check compiles nothing"
    assert "K31-0507: 2 entries are not warm: decode batch 3, decode batch 4 (k31.toml)" in lines[-1][1]
    assert any(
        "decode batch 3: cold: this graph is not in the cache: the cache has no entry yet" in line for _, line in lines
    )

    code, out, lines, wall = run(tmp_path, "warm", "--json")
    document = json.loads(out)
    assert code == 0
    assert [job["state"] for job in document["jobs"]] == ["compiled", "compiled"]
    assert [job["sizes"] for job in document["jobs"]] == [{"batch": 3}, {"batch": 4}]
    assert (document["hits"], document["misses"]) == (0, 2)
    assert_phases_add_up(document, wall)
    assert {"start", "model", "dynamo", "passes", "codegen", "run"} <= set(document["phases"])
    texts = [line for _, line in lines]
    keys = [job["keys"][0][:12] for job in document["jobs"]]
    assert f"warm: decode batch 3: graph {keys[0]} is not in the cache: the cache has no entry yet" in texts
    assert any(
        line.startswith(f"warm: decode batch 4: graph {keys[1]} is not in the cache: nearest entry") for line in texts
    )
    times = [0.0, *(at for at, _ in lines), wall]
    assert max(late - early for early, late in itertools.pairwise(times)) < 8.0, "never silent for long"
    assert not any("\x1b" in line for line in texts)

    code, out, lines, wall = run(tmp_path, "warm", "--json")
    document = json.loads(out)
    assert code == 0
    assert [job["state"] for job in document["jobs"]] == ["found", "found"], "also the second one of its process"
    assert "codegen" not in document["phases"]
    assert (document["hits"], document["misses"]) == (2, 0)
    assert_phases_add_up(document, wall)
    assert any("decode batch 3: in the cache already" in line for _, line in lines)

    code, out, lines, _ = run(tmp_path, "warm", "--check", K31_REQUIRE_WARM="1")
    assert code == 0
    assert "2 entries in " in out
    assert "2 found; 0 graphs missed and 2 hit" in out


@pytest.mark.slow
def test_one_failing_entry_does_not_stop_the_others(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    entries = '"model.py:broken", "model.py:dies", { target = "model.py:decode", options = { codegen = "ops" } }'
    (tmp_path / "k31.toml").write_text(f"workers = 2\nentries = [{entries}]\n")
    code, out, _, _ = run(tmp_path, "warm", "--json")
    document = json.loads(out)
    assert code == 1
    assert [job["state"] for job in document["jobs"]] == ["failed", "failed", "not kept"]
    broken, dies, ops = document["jobs"]
    assert broken["error"]["code"] == "K31-0107"
    assert broken["error"]["what"] == "broken fails as it is written: ValueError: no weights"
    assert "its process ended with 7" in dies["error"]["what"]
    assert "codegen='ops' builds nothing that could be kept" in ops["why"]


@pytest.mark.slow
def test_what_cannot_be_loaded_is_one_line(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "k31.toml").write_text('entries = ["model.py:decoed"]')
    code, _, lines, _ = run(tmp_path, "warm")
    assert code == 2
    assert "K31-0103: model.py has no 'decoed'; did you mean 'decode'?" in lines[-1][1]
    (tmp_path / "k31.toml").write_text('entries = ["model.py:decode"]\nbuckets = { bacth = [1] }')
    code, _, lines, _ = run(tmp_path, "warm")
    assert code == 2
    assert "buckets names 'bacth', and entry 'decode' has no such dimension" in lines[-1][1]
    assert "its dimensions: batch" in lines[-1][1]
