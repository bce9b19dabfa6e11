"""A schedule run by threads: results, caches, order, memory, failures; what it finds out the verifier names too."""

import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from drawn_modules import drawn_module, inputs, scheduled
from torch.fx.experimental.proxy_tensor import make_fx

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.tasks import Task, TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule
from k31compile.targets.streams.scheduled_module import ScheduledModule


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run_eagerly(module, seed=0):
    """What the graph returns and leaves in its inputs, one node after the other."""
    given = inputs(seed)
    return [*module(*given), *given]


def run_scheduled(run, seed=0):
    given = inputs(seed)
    return [*run(*given), *given]


def late(stream, seconds):
    """Holds up each unit of one stream."""
    return lambda number, name: time.sleep(seconds) if number == stream else None


@pytest.mark.parametrize("count", [6, pytest.param(80, marks=pytest.mark.slow)])
def test_drawn_graphs_give_bit_for_bit_what_they_give_eagerly(count):
    wide = 0
    for seed in range(count):
        module = drawn_module(random.Random(f"graph {seed}"))
        _, schedule = scheduled(module)
        expected = run_eagerly(module)
        for stream in range(-1, len(schedule.streams)):
            run = ScheduledModule(module, schedule, poison=True, watch=late(stream, 0.002))
            for _ in range(2):
                assert same(run_scheduled(run), expected), f"seed {seed}, stream {stream} late"
            run.close()
        wide += len(schedule.streams) > 1
    assert wide > count // 2


def test_it_can_be_called_again_and_from_several_threads():
    module = drawn_module(random.Random("again"))
    run = ScheduledModule(module, scheduled(module)[1])
    expected = {seed: run_eagerly(module, seed) for seed in range(4)}
    wrong = []

    def work(seed):
        wrong.extend(seed for _ in range(10) if not same(run_scheduled(run, seed), expected[seed]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def in_place():
    """A cache written in place beside the caller's stream, and read after that: row E1 of the reports."""

    def run(x, cache):
        new = x * 2
        cache.copy_(new)
        return (cache + 1,)

    return make_fx(run, tracing_mode="fake")(torch.zeros(4), torch.zeros(4))


IN_PLACE = Schedule(
    (("enter", "mul", "add", "return"), ("copy_",)),
    (("mul", "copy_"), ("copy_", "add")),
    (("mul", 1),),
    {},
    0.0,
    0.0,
    0.0,
    0.0,
)


def tasks_in_place():
    return TaskGraph(
        [
            Task("enter", 0.0, "memory"),
            Task("mul", 0.0, "vector", reads=("x_1",), inputs=("enter",)),
            Task("copy_", 0.0, "vector", writes=("cache_1",), inputs=("enter", "mul")),
            Task("add", 0.0, "vector", reads=("cache_1",), inputs=("enter",)),
            Task("return", 0.0, "memory", inputs=("enter", "add")),
        ]
    )


def test_a_write_on_a_late_stream_is_seen_by_the_reader_behind_its_event():
    run = ScheduledModule(in_place(), IN_PLACE, poison=True, watch=late(1, 0.05))
    cache = torch.zeros(4)
    (result,) = run(torch.ones(4), cache)
    assert result.tolist() == [3.0] * 4
    assert cache.tolist() == [2.0] * 4


def test_without_the_event_the_reader_is_stale_and_the_verifier_objects():
    missing = replace(IN_PLACE, events=(("mul", "copy_"),))
    (result,) = ScheduledModule(in_place(), missing, watch=late(1, 0.05))(torch.ones(4), torch.zeros(4))
    assert result.tolist() == [1.0] * 4
    tasks = tasks_in_place()
    with pytest.raises(ScheduleError, match=r"'add' may start before 'copy_' has ended .reads 'cache_1'"):
        verify_schedule(tasks, missing)


def crossing():
    """a on one stream is read on the other and nowhere else behind that: row E3 of the reports."""

    def run(x):
        a = torch.exp(x)
        b = torch.tanh(a)
        c = torch.neg(a)
        return (b + c,)

    return make_fx(run, tracing_mode="fake")(torch.zeros(64))


@pytest.mark.parametrize("side", [0, 1])
def test_memory_that_crosses_streams_is_kept_in_both_directions(side):
    """The tensor is made on `side`, and its reader on the other stream comes late."""
    one, other = ("exp", "neg"), ("tanh", "add")
    streams = (other, one) if side else (("exp", "neg", "add"), ("tanh",))
    events = (("exp", "tanh"), ("neg", "add") if side else ("tanh", "add"))
    keeps = (("exp", 0), ("neg", 0)) if side else (("exp", 1), ("tanh", 0))
    schedule = Schedule(streams, events, keeps, {}, 0.0, 0.0, 0.0, 0.0)
    x = torch.randn(64)
    expected = torch.tanh(x.exp()) - x.exp()

    def reader_is_late(number, name):
        if name == "tanh":
            time.sleep(0.05)

    kept = ScheduledModule(crossing(), schedule, poison=True, watch=reader_is_late)
    assert torch.equal(kept(x)[0], expected)
    none = replace(schedule, keeps=())
    freed = ScheduledModule(crossing(), none, poison=True, watch=reader_is_late)
    assert freed(x)[0].isnan().all()
    with pytest.raises(ScheduleError, match="the result of 'exp' is not there when 'tanh' reads it"):
        ScheduledModule(crossing(), none, watch=reader_is_late)(x)
    rows = [("exp", ()), ("tanh", ("exp",)), ("neg", ("exp",)), ("add", ("tanh", "neg"))]
    graph = TaskGraph([Task(name, 0.0, "vector", inputs=read) for name, read in rows])
    for keep in keeps:
        with pytest.raises(ScheduleError, match=f"the result of '{keep[0]}' may be freed before"):
            verify_schedule(graph, replace(schedule, keeps=tuple(other for other in keeps if other != keep)))


def test_a_result_is_dropped_when_nobody_is_left_to_read_it():
    import weakref

    seen = {}

    def watch(number, name):
        if name == "add":
            seen["alive"] = [reference() is not None for reference in made]

    made = []
    schedule = Schedule((("exp", "tanh", "neg", "add"),), (), (), {}, 0.0, 0.0, 0.0, 0.0)
    run = ScheduledModule(crossing(), schedule, watch=watch)
    part = run._cut.parts["exp"]

    def keep_an_eye(*given):
        results = part.run(*given)
        made.extend(map(weakref.ref, results))
        return results

    run._cut.parts["exp"] = replace(part, run=keep_an_eye)
    run(torch.zeros(64))
    assert seen["alive"] == [False]


@pytest.mark.parametrize("failing", ["exp", "tanh", "neg", "add"])
def test_a_failure_on_any_stream_comes_to_the_caller_with_its_task_and_nothing_hangs(failing):
    schedule = Schedule(
        (("exp", "neg", "add"), ("tanh",)),
        (("exp", "tanh"), ("tanh", "add")),
        (("exp", 1), ("tanh", 0)),
        {},
        0.0,
        0.0,
        0.0,
        0.0,
    )
    broken = {failing}

    def watch(number, name):
        if name in broken:
            raise RuntimeError("out of luck")

    run = ScheduledModule(crossing(), schedule, watch=watch)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of luck") as caught:
            run(torch.zeros(64))
        stream = 1 if failing == "tanh" else 0
        assert caught.value.__notes__ == [f"raised by '{failing}' on stream {stream} of the schedule"]
    broken.clear()
    assert torch.equal(run(torch.zeros(64))[0], torch.tanh(torch.ones(64)) - 1)


def test_wrong_inputs_and_graphs_are_told_in_a_line():
    schedule = Schedule((("exp", "tanh", "neg", "add"),), (), (), {}, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ScheduleError, match="the graph takes 1 inputs, and 2 were given"):
        ScheduledModule(crossing(), schedule)(torch.zeros(64), torch.zeros(64))
    module = crossing()
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    with module.graph.inserting_before(node):
        node.args = (module.graph.call_function(torch.ops.aten.reshape.default, (node.args[0], [64])),)
    with pytest.raises(ScheduleError, match=r"'reshape_default' may be a view or a copy .aten.reshape.default"):
        ScheduledModule(module, schedule)


def test_inference_mode_reaches_every_stream():
    module = drawn_module(random.Random("graph 1"))
    run = ScheduledModule(module, scheduled(module)[1])
    expected = run_eagerly(module)
    with torch.inference_mode():
        assert same(run_scheduled(run), expected)


def test_the_operators_of_every_stream_use_the_caller_s_number_of_threads():
    """Asked of OpenMP itself: torch answers with what it would set before the first loop of its own."""
    import ctypes

    max_threads = ctypes.CDLL(None).omp_get_max_threads
    seen = {}
    schedule = Schedule(
        (("exp", "neg", "add"), ("tanh",)), (("exp", "tanh"), ("tanh", "add")), (("exp", 1), ("tanh", 0)), {},
        0.0, 0.0, 0.0, 0.0,
    )  # fmt: skip
    run = ScheduledModule(crossing(), schedule, watch=lambda number, name: seen.update({number: max_threads()}))
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            run(torch.zeros(64))
            assert seen == {0: count, 1: count}
    finally:
        torch.set_num_threads(before)
