"""codegen="tiered": at once operator by operator, then as a child built it; told, exactly once a call, nothing left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import k31compile
from k31compile.report import Report, clear_reports
from k31compile.targets import tiered
from k31compile.targets.builder import Builder
from k31compile.targets.tiered import _condition

PATIENCE = 300.0
TIERED = {"codegen": "tiered"}
LOGGED = """#!/bin/sh
echo "$PPID $*" >> {log}
exec {compiler} "$@"
"""
BROKEN = """#!/bin/sh
case "$*" in *--version*|*-v) exec {compiler} "$@";; esac
echo "no space left" >&2; exit 1
"""


@pytest.fixture(autouse=True)
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Builder]:
    """A child of the test's own, with an empty cache of Inductor's and no report of an earlier test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    clear_reports()
    own = Builder()
    monkeypatch.setattr(tiered, "BUILDER", own)
    yield own
    own.stop()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Put a script in front of g++; returns the file that it may log to."""

    def put(script: str) -> Path:
        folder, log = tmp_path / "bin", tmp_path / "g++.log"
        folder.mkdir()
        found = subprocess.run(
            ["sh", "-c", "command -v g++"], capture_output=True, text=True, check=True
        ).stdout.strip()
        (folder / "g++").write_text(script.format(log=log, compiler=found))
        (folder / "g++").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return log

    return put


class Counting(torch.nn.Module):
    """It writes a cache and a buffer, and returns something that does not lie in the usual order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Linear(6, 10)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, cache: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen += 1
        cache.index_copy_(0, place, cache.index_select(0, place) + 1)
        y = self.weight(x).sin()
        return y.transpose(0, 1) * self.seen, cache


def settled(call: Callable[[], object], report: Report) -> int:
    """Call until the build has taken over or failed, at least once; returns the number of calls."""
    begin, calls = time.monotonic(), 0
    while calls == 0 or report.tier == "ops":
        assert time.monotonic() - begin < PATIENCE, report
        time.sleep(0.05)
        call()
        calls += 1
    return calls


def test_it_runs_at_once_and_the_build_takes_over(compiler: Callable[[str], Path], builder: Builder) -> None:
    log = compiler(LOGGED)
    model, twin = Counting(), Counting()
    compiled = torch.compile(model, backend="k31", options=TIERED, dynamic=False)
    x, place = torch.randn(3, 6), torch.tensor([1])
    ours, theirs = torch.zeros(4, 5), torch.zeros(4, 5)

    def call() -> None:
        with torch.no_grad():
            (got, cache), (wanted, _) = compiled(x, ours, place), twin(x, theirs, place)
        assert cache is ours
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted)
        assert torch.equal(ours, theirs)  # one write a call, whoever ran it
        assert model.seen == twin.seen

    call()
    report = k31compile.last_report()
    assert report.tier == "ops"
    calls = settled(call, report)
    assert report.tier == "inductor", report.notes
    for _ in range(3):
        call()
    assert ours[1, 0] == calls + 4
    assert report.phases["child"] > report.phases["swap"] > 0
    (note,) = (note for note in report.notes if note.startswith("tiered: "))
    assert f"call {calls + 1} and those after it run what Inductor built in a child process" in note
    built = [line for line in log.read_text().splitlines() if "-o" in line.split() or ".cpp" in line]
    assert built
    assert not [line for line in built if line.split()[0] == str(os.getpid())]


@pytest.mark.slow
def test_a_broken_compiler_is_told_and_the_graph_goes_on(compiler: Callable[[str], Path]) -> None:
    compiler(BROKEN)
    compiled = torch.compile(torch.cos, backend="k31", options=TIERED)
    strict = torch.compile(torch.sin, backend="k31", options={**TIERED, "strict": True})
    x = torch.randn(500)
    compiled(x)
    strict(x)
    first, second = k31compile.reports()
    settled(lambda: compiled(x), first)
    assert first.tier == "failed"
    assert "tiered: this graph stays operator by operator: " in first.notes[-1]
    assert torch.equal(compiled(x), x.cos())
    with pytest.raises(Exception, match="K31-0206: tiered: this graph stays operator by operator"):
        settled(lambda: strict(x), second)


@pytest.mark.slow
def test_two_graphs_queue_for_one_child_which_others_may_kill(builder: Builder) -> None:
    functions = [lambda x: x.sin().cos() + 1, lambda x: x.exp().sum(-1)]
    compiled = [torch.compile(function, backend="k31", options=TIERED, dynamic=False) for function in functions]
    x = torch.randn(40, 7)
    for one in compiled:
        one(x)
    child = builder._child
    assert child is not None
    reports = k31compile.reports()
    settled(lambda: compiled[0](x), reports[0])
    settled(lambda: compiled[1](x), reports[1])
    assert [report.tier for report in reports] == ["inductor", "inductor"]
    assert builder._child is child
    for one, function in zip(compiled, functions, strict=True):
        torch.testing.assert_close(one(x), function(x))
    third = torch.compile(lambda x: x.tan(), backend="k31", options=TIERED, dynamic=False)
    third(x)
    os.killpg(child.pid, signal.SIGKILL)
    report = k31compile.last_report()
    settled(lambda: third(x), report)
    assert report.tier == "failed"
    assert "ended with signal 9" in report.notes[-1]
    fourth = torch.compile(lambda x: x.tanh(), backend="k31", options=TIERED, dynamic=False)
    fourth(x)
    assert builder._child is not child
    settled(lambda: fourth(x), k31compile.last_report())
    assert k31compile.last_report().tier == "inductor"


@pytest.mark.slow
def test_one_build_serves_the_lengths_that_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tiered.Tiered] = []
    plain = tiered.Tiered
    monkeypatch.setattr(tiered, "Tiered", lambda *args: made.append(plain(*args)) or made[-1])

    def rows(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin().sum(0)

    compiled = torch.compile(rows, backend="k31", options=TIERED)
    x = torch.randn(13, 5)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x)
    report = k31compile.last_report()
    settled(lambda: compiled(x), report)
    assert report.tier == "inductor", report.notes
    monkeypatch.delattr(made[0], "_run")  # what runs operator by operator
    for length in (2, 7, 64, 1000):
        other = torch.randn(length, 5)
        torch.testing.assert_close(compiled(other), rows(other.double()).float(), rtol=1e-4, atol=1e-4)
    assert len(k31compile.reports()) == 1


def test_sizes_beyond_the_conditions_are_seen() -> None:
    fits = _condition("2 <= L['t0'] and L['t0'] <= 50 and L['t1'] % 4 == 0", [0, 2])
    inputs = [[7, None, 8], [1, None, 8], [51, None, 8], [7, None, 6], [7, None, 8]]
    assert [fits(each) for each in inputs] == [True, False, False, False, True]
    assert _condition("", [])([])


@pytest.mark.slow
def test_threads_may_call_while_it_takes_over() -> None:
    compiled = torch.compile(lambda x: (x.sin() + x.cos()).relu(), backend="k31", options=TIERED, dynamic=False)
    x = torch.randn(50, 4)
    wanted = (x.sin() + x.cos()).relu()
    compiled(x)
    report = k31compile.last_report()
    wrong: list[object] = []

    def serve() -> None:
        try:
            while report.tier == "ops":
                torch.testing.assert_close(compiled(x), wanted)
                time.sleep(0.01)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong
    assert report.tier == "inductor"


@pytest.mark.slow
def test_nested_regions_are_built_too() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x).sin()

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.ModuleList([Layer(), Layer(), Layer()])])

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    stack, x = Stack().eval(), torch.randn(5, 8)
    compiled = k31compile.compile(stack, codegen="tiered")
    with torch.no_grad():
        compiled(x)
        report = k31compile.last_report()
        settled(lambda: compiled(x), report)
        assert report.tier == "inductor", report.notes
        torch.testing.assert_close(compiled(x), stack(x))


def test_what_cannot_be_handed_over_is_told_at_once(builder: Builder) -> None:
    builder._owner = -1  # as in a fork of the process that has the child
    compiled = torch.compile(torch.cos, backend="k31", options=TIERED)
    x = torch.randn(9)
    assert torch.equal(compiled(x), x.cos())
    assert k31compile.last_report().tier == "failed"
    assert "this process is a fork" in k31compile.last_report().notes[-1]


LEAVING = """
import os, signal, torch
compiled = torch.compile(torch.cos, backend="k31", options={"codegen": "tiered"})
compiled(torch.randn(9))
from k31compile.targets.builder import BUILDER
print(BUILDER._child.pid, BUILDER._spool, flush=True)
if %r:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_the_child_ends_with_its_parent(killed: bool) -> None:
    command = [sys.executable, "-P", "-c", LEAVING % killed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == killed, done.stderr
    child, spool = done.stdout.split()
    begin = time.monotonic()
    while group_lives(int(child)) or Path(spool).exists():
        assert time.monotonic() - begin < 20
        time.sleep(0.1)


def group_lives(leader: int) -> bool:
    """Whether a process of the group still runs; one that has ended and that nobody has waited for does not."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = status.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z":
            return True
    return False


def test_under_autocast_it_stays_operator_by_operator():
    torch._dynamo.reset()
    model, x = torch.nn.Linear(32, 32), torch.randn(4, 32)
    run = torch.compile(model, backend="k31", options={"codegen": "tiered"})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, expected = run(x), model(x)
    assert torch.equal(got, expected)
    assert got.dtype == torch.bfloat16
    assert k31compile.last_report().tier == "failed"
    assert any("autocast casts what its operators are given" in note for note in k31compile.last_report().notes)
