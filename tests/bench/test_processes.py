"""Workers: answers, failures in one line, time limits."""

import sys
import time

import pytest
import torch

from k31compile.bench.failure import in_one_line
from k31compile.bench.machine import KEEPING, machine_facts, version_facts
from k31compile.bench.models import model_cases
from k31compile.bench.process import Worker, environment
from k31compile.errors import BenchError

SERVE = """
import os, sys, time
from k31compile.bench.worker import serve

def fail(task):
    raise ValueError("no such\\nthing")

serve({
    "add": lambda task: print("noise") or task["a"] + task["b"],
    "fail": fail,
    "sleep": lambda task: time.sleep(60),
    "die": lambda task: (print("last words", file=sys.stderr, flush=True), os._exit(3)),
    "environment": lambda task: [os.environ.get(name) for name in task["names"]],
})
"""


@pytest.fixture
def worker():
    made = Worker(["-c", SERVE], environment(1))
    yield made
    made.stop()


def test_a_worker_answers_and_what_it_prints_is_no_answer(worker: Worker) -> None:
    assert worker.ask({"task": "add", "a": 1, "b": 2}, 60) == 3
    assert worker.ask({"task": "add", "a": "x", "b": "y"}, 60) == "xy"


def test_a_failed_task_is_one_line_and_the_next_one_works(worker: Worker) -> None:
    with pytest.raises(BenchError, match=r"K31-0604: ValueError: no such;"):
        worker.ask({"task": "fail"}, 60)
    assert worker.ask({"task": "add", "a": 1, "b": 2}, 60) == 3


def test_a_dead_worker_is_told_with_its_last_words(worker: Worker) -> None:
    with pytest.raises(BenchError, match="the process ended with 3: last words"):
        worker.ask({"task": "die"}, 60)
    assert not worker.is_there()


def test_a_worker_that_takes_too_long_is_stopped(worker: Worker) -> None:
    worker.ask({"task": "add", "a": 1, "b": 2}, 60)
    start = time.monotonic()
    with pytest.raises(BenchError, match="stopped after 1 s"):
        worker.ask({"task": "sleep"}, 1)
    assert time.monotonic() - start < 30
    assert not worker.is_there()


def test_workers_keep_large_temporaries_and_have_the_threads_of_the_run(worker: Worker) -> None:
    names = [*KEEPING, "OMP_NUM_THREADS"]
    assert worker.ask({"task": "environment", "names": names}, 60) == [*KEEPING.values(), "1"]


MEASURE = """
import torch
from k31compile.bench.memory import peak_extra_bytes
from k31compile.bench.worker import serve

torch.set_num_threads(1)

def three(mebibytes):
    first = torch.ones(mebibytes << 18)
    return (first + first * 2).sum()

for size in (2, 16, 24, 4, 8):
    three(size)
serve({"measure": lambda task: [peak_extra_bytes(lambda: three(size)) for size in task["sizes"]]})
"""


def test_temporaries_are_seen_each_time_although_the_heap_keeps_them() -> None:
    worker, sizes = Worker(["-c", MEASURE], environment(1)), [2, 8, 16, 4, 8, 16, 2]
    try:
        found = worker.ask({"task": "measure", "sizes": sizes}, 120)
    finally:
        worker.stop()
    if None in found:
        pytest.skip("this kernel does not tell resident peaks")
    assert all(abs(one / 2**20 - 3 * size) < 1 for one, size in zip(found, sizes, strict=True)), found


def test_facts_are_those_of_this_process() -> None:
    machine, versions = machine_facts(1), version_facts()
    assert machine["time"] == "CPU time of the one thread"
    assert machine_facts(2)["time"] == "wall time"
    assert isinstance(machine["malloc_keeps_temporaries"], bool)
    assert versions["torch"] == torch.__version__
    assert versions["python"] == sys.version.split()[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no such\nthing", "ValueError: no such"),
        ("backend='k31' raised:\n\n  K31-0201: a reason\nmore", "ValueError: backend='k31' raised: K31-0201: a reason"),
        ("", "ValueError"),
    ],
)
def test_a_failure_is_one_line_that_tells_something(text: str, told: str) -> None:
    assert in_one_line(ValueError(text)) == told


def test_every_model_case_has_a_name_of_its_own() -> None:
    names = [case.full_name for case in model_cases()]
    assert len(set(names)) == len(names)
    assert {case.name for case in model_cases()} == {"mini", "kimi_linear", "tiny"}
    assert any(case.is_quick for case in model_cases())
