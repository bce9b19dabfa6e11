"""Calls of a scheduled graph that do not go as planned: interrupts, forks, re-entry, modes, and inputs that overlap."""

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.graph_tasks import tasks_of
from k31compile.passes.schedule.schedule import Schedule, SuperKernel
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.targets.streams.scheduled_module import ScheduledModule

COSTS = load_costs("ascend-a3")


def by_hand(streams, events=(), keeps=(), regions=()):
    names = tuple(tuple(stream.split()) for stream in streams)
    return Schedule(names, tuple(events), tuple(keeps), {}, 0.0, 0.0, 0.0, 0.0, tuple(regions))


def there_and_back():
    """exp -> tanh -> add -> neg, on three streams: the last one waits for the caller's, which waits for the second."""

    def run(x):
        a = torch.exp(x)
        return (torch.neg(a + torch.tanh(a)),)

    module = make_fx(run, tracing_mode="fake")(torch.zeros(64))
    schedule = by_hand(
        ["exp add", "tanh", "neg"],
        [("exp", "tanh"), ("tanh", "add"), ("add", "neg")],
        [("exp", 1), ("tanh", 0), ("add", 2)],
    )
    return module, schedule


EXPECTED = -(1 + torch.tanh(torch.ones(64)))


def streams_alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("k31-stream")]


def test_an_interrupt_while_the_caller_waits_leaves_no_stream_waiting():
    slow = True
    run = ScheduledModule(*there_and_back(), watch=lambda _, name: time.sleep(0.5 if name == "tanh" and slow else 0))

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            run(torch.zeros(64))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    slow = False
    results = []
    again = threading.Thread(target=lambda: results.append(run(torch.zeros(64))[0]), daemon=True)
    again.start()
    again.join(20)
    assert torch.allclose(results[0], EXPECTED)


def test_no_thread_to_be_had_is_an_error_and_no_stream_waits_for_ever(monkeypatch):
    run = ScheduledModule(*there_and_back())
    submit, calls = run._workers.submit, []

    def refuse_the_second(*given):
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("can't start new thread")
        return submit(*given)

    monkeypatch.setattr(run._workers, "submit", refuse_the_second)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run(torch.zeros(64))
    assert torch.allclose(run(torch.zeros(64))[0], EXPECTED)


@pytest.mark.slow
def test_a_child_of_a_fork_has_streams_of_its_own():
    text = """
        import os, sys
        import torch
        sys.path.insert(0, {folder!r})
        from test_scheduled_calls import there_and_back
        from k31compile.targets.streams.scheduled_module import ScheduledModule
        torch.set_num_threads(1)  # what OpenMP holds does not outlive a fork
        run = ScheduledModule(*there_and_back())
        run(torch.zeros(64))
        child = os.fork()
        if not child:
            import signal
            signal.alarm(20)
            os._exit(0 if torch.equal(run(torch.zeros(64))[0], run(torch.zeros(64))[0]) else 3)
        print(os.waitpid(child, 0)[1])
    """
    text = textwrap.dedent(text).format(folder=os.path.dirname(__file__))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0"], done.stderr


@pytest.mark.parametrize("task", ["exp", "tanh"])
def test_a_task_that_calls_its_own_module_is_an_error_of_one_line(task):
    inner = []

    def watch(_, name):
        if name == task and not inner:
            inner.append(name)
            run(torch.zeros(64))

    run = ScheduledModule(*there_and_back(), watch=watch)
    with pytest.raises(ScheduleError, match="a task calls the scheduled module that it is part of"):
        run(torch.zeros(64))
    assert torch.allclose(run(torch.zeros(64))[0], EXPECTED)


def test_a_task_may_call_another_scheduled_module():
    other = ScheduledModule(*there_and_back())
    seen = []
    run = ScheduledModule(*there_and_back(), watch=lambda *_: seen.append(other(torch.zeros(64))[0]))
    assert torch.allclose(run(torch.zeros(64))[0], EXPECTED)
    assert len(seen) == 4
    assert all(torch.allclose(one, EXPECTED) for one in seen)


def test_autocast_around_a_call_changes_nothing_on_any_stream():
    def products(x, w):
        return torch.mm(x, w), torch.mm(w, x)

    x, w = torch.randn(32, 32), torch.randn(32, 32)
    run = ScheduledModule(make_fx(products, tracing_mode="fake")(x, w), by_hand(["mm", "mm_1"]))
    with torch.autocast("cpu", torch.bfloat16):
        results = run(x, w)
    assert all(torch.equal(one, other) for one, other in zip(results, products(x, w), strict=True))


def written_and_read():
    """The cache is written on one stream, and x, which is no cache, is read after that on another."""

    def run(x, cache):
        cache.copy_(x * 2)
        return (x + 1,)

    return make_fx(run, tracing_mode="fake")(torch.zeros(4), torch.zeros(4)), by_hand(["mul copy_", "add"])


@pytest.mark.parametrize("late", [0, 1])
def test_an_input_that_is_written_and_is_another_one_too(late):
    module, schedule = written_and_read()
    run = ScheduledModule(module, schedule, watch=lambda stream, _: time.sleep(0.02 if stream == late else 0))
    x = torch.ones(4)
    assert run(x, x)[0].tolist() == [3.0] * 4
    assert x.tolist() == [2.0] * 4
    whole = torch.ones(6)
    assert run(whole[:4], whole[2:])[0].tolist() == [2.0, 2.0, 3.0, 3.0]
    assert run.launched == 3


def test_inputs_side_by_side_in_one_memory_are_apart():
    module, schedule = written_and_read()
    both = torch.ones(2, 4)
    seen = []
    run = ScheduledModule(module, schedule, watch=lambda stream, _: seen.append(stream))
    assert run(both[0], both[1])[0].tolist() == [2.0] * 4
    assert both[1].tolist() == [2.0] * 4
    assert set(seen) == {0, 1}


def draws_twice(x):
    first = torch.rand_like(x) + torch.rand_like(x).sin()
    return first, torch.nn.functional.dropout(x, 0.5, training=True)


def test_who_draws_random_numbers_draws_them_in_the_order_of_the_program():
    x = torch.ones(64)
    module = make_fx(draws_twice, tracing_mode="fake")(x)
    graph = TaskGraph(tasks_of(module, COSTS))
    drawing = [task.name for task in graph.tasks if task.name.startswith(("rand", "native", "bern"))]
    assert len(drawing) == 3
    assert set(itertools.pairwise(drawing)) <= set(graph.edges())
    schedule = schedule_tasks(graph, 0.0)
    torch.manual_seed(7)
    expected = module(x)
    for late in range(len(schedule.streams)):
        run = ScheduledModule(module, schedule, watch=lambda stream, _, late=late: time.sleep(0.01 * (stream == late)))
        torch.manual_seed(7)
        assert all(torch.equal(one, other) for one, other in zip(run(x), expected, strict=True))


@pytest.mark.slow
def test_a_super_kernel_draws_what_its_operators_draw():
    x = torch.ones(64)
    module = make_fx(lambda x: (torch.rand_like(x).sin(),), tracing_mode="fake")(x)
    region = SuperKernel("both", ("rand_like", "sin"))
    run = ScheduledModule(module, by_hand(["rand_like sin"], regions=[region]))
    torch.manual_seed(7)
    (expected,) = module(x)
    torch.manual_seed(7)
    assert torch.allclose(run(x)[0], expected)


def test_attention_without_dropout_draws_nothing():
    q = torch.randn(1, 2, 8, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    for share, count in ((0.0, 0), (0.5, 1)):
        module = make_fx(functools.partial(lambda share, q: (attend(q, q, q, dropout_p=share),), share))(q)
        tasks = tasks_of(module, COSTS)
        assert sum("random numbers" in task.writes for task in tasks) == count, module.code


def test_a_closed_module_says_so():
    run = ScheduledModule(*there_and_back())
    run.close()
    with pytest.raises(ScheduleError, match="the scheduled module was closed"):
        run(torch.zeros(64))


def test_threads_and_values_go_with_a_module_also_after_a_failure():
    import gc

    before = len(streams_alive())

    def fail(_, name):
        if name == "tanh":
            raise RuntimeError("out of luck")

    gc.disable()
    try:
        for watch in (None, fail):
            run = ScheduledModule(*there_and_back(), watch=watch)
            with contextlib.suppress(RuntimeError):
                run(torch.zeros(64))
            assert len(streams_alive()) == before + 2
            del run
            until = time.monotonic() + 10
            while len(streams_alive()) > before and time.monotonic() < until:
                time.sleep(0.01)
            assert len(streams_alive()) == before, watch
    finally:
        gc.enable()
