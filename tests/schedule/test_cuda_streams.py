"""A schedule on CUDA streams: the order of what is issued, with streams that write it down, and the real thing."""

import contextlib
import random

import pytest
import torch
from drawn_modules import drawn_module, inputs, scheduled

from k31compile.errors import TargetError
from k31compile.targets.cuda_streams import CudaScheduledModule


class Recorded:
    """Stands where torch.cuda does, runs everything at once, and writes down who recorded and who waited."""

    def __init__(self):
        self.log = []
        self.made = [Stream(self.log, 0)]
        self.running = [self.made[0]]

    def is_available(self):
        return True

    def Stream(self):
        self.made.append(Stream(self.log, len(self.made)))
        return self.made[-1]

    def current_stream(self):
        return self.running[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        self.running.append(stream)
        yield
        self.running.pop()


class Stream:
    def __init__(self, log, number):
        self.log, self.number = log, number

    def wait_stream(self, other):
        self.log.append(("join", other.number, self.number))

    def wait_event(self, event):
        assert ("record", *event) in self.log, "it waits for what was recorded before"
        self.log.append(("wait", event[0], self.number))

    def record_event(self):
        event = (self.number, len(self.log))
        self.log.append(("record", *event))
        return event


def test_every_event_is_recorded_and_waited_for_and_the_results_are_right():
    waits = 0
    for seed in range(12):
        module = drawn_module(random.Random(f"cuda {seed}"))
        _, schedule = scheduled(module)
        cuda = Recorded()
        run = CudaScheduledModule(module, schedule, cuda)
        given, expected = inputs(), inputs()
        results = [*run(*given), *given]
        assert all(torch.equal(a, b) for a, b in zip(results, [*module(*expected), *expected], strict=True))
        stream_of = schedule.stream_of
        crossing = sorted((stream_of[after], stream_of[before]) for after, before in schedule.events)
        assert sorted((one, other) for kind, one, other in cuda.log if kind == "wait") == crossing
        beside = range(1, len(schedule.streams))
        assert cuda.log[: len(beside)] == [("join", 0, number) for number in beside]
        assert cuda.log[len(cuda.log) - len(beside) :] == [("join", number, 0) for number in beside]
        waits += len(crossing)
    assert waits > 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line():
    module = drawn_module(random.Random("none"))
    with pytest.raises(TargetError, match=r"needs a GPU, and (this torch was built without CUDA|no CUDA device)"):
        CudaScheduledModule(module, scheduled(module)[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the schedule is not run on CUDA streams")
def test_on_a_gpu_it_gives_what_one_stream_gives():
    for seed in range(8):
        module = drawn_module(random.Random(f"cuda {seed}"))
        run = CudaScheduledModule(module, scheduled(module)[1])
        for _ in range(3):
            given, expected = ([value.cuda() for value in inputs()] for _ in range(2))
            results = [*run(*given), *given]
            torch.testing.assert_close(results, [*module(*expected), *expected])
