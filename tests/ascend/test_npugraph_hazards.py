"""What npugraph_ex would make of streams by itself, and that nothing of it is left (rows E1 and E3)."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.verify_schedule import verify_order
from k31compile.targets.ascend.offline.capture import AS_SCHEDULED, KEEP, RECORD, WAIT, forget_events, generate
from k31compile.targets.ascend.offline.convert import convert
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.profiles import profile_of
from k31compile.targets.ascend.tagged_streams import write_tagged_streams
from k31compile.targets.ascend.verify_lowered import read_schedule, tasks_after
from k31compile.targets.streams.scheduled_module import ScheduledModule

PROFILE = profile_of("ascend-950", "npugraph_ex")
COSTS = load_costs(PROFILE.name)


def overwritten_input(x):
    """Main reads a view first, the side stream reads it too, and main overwrites the memory behind it."""
    seen = x.view(-1)
    on_main, on_side = torch.exp(seen), torch.tanh(seen)
    x.copy_(x + 1)
    return on_main, on_side


def overwritten_result(x):
    """The same of a result, which has no reader behind the addition, so that it looks free to be written."""
    made = torch.relu(x)
    seen = made.view(-1)
    on_main, on_side = torch.exp(seen), torch.tanh(seen)
    return made + 1, on_main, on_side


INPUT = (
    overwritten_input,
    (("enter", "exp", "add", "copy_", "return"), ("tanh",)),
    (("tanh", "copy_"),),
    (("enter", 1), ("tanh", 0)),
)
RESULT = (
    overwritten_result,
    (("enter", "relu", "exp", "add", "return"), ("tanh",)),
    (("relu", "tanh"), ("tanh", "return")),
    (("enter", 1), ("relu", 1), ("tanh", 0)),
)


def lower(case, options=AS_SCHEDULED, keeps=None, inputs=None):
    """The generated graph, its calls, its tasks, the schedule that was written, and the one that is read back."""
    run, streams, events, kept = case
    open_session(PROFILE)
    inputs = [torch.zeros(4, 16)] if inputs is None else inputs
    module = make_fx(run, tracing_mode="fake")(*inputs)
    tasks = [node.name for node in module.graph.nodes if node.op == "call_function"]
    order = {name: (float(at), float(at)) for at, name in enumerate(("enter", *tasks, "return"))}
    schedule = Schedule(streams, events, kept if keeps is None else keeps, order, 0.0, 0.0, 0.0, 0.0)
    forget_events()
    write_tagged_streams(module, schedule, "small")
    graph = generate(module, inputs, "small", options)
    after = tasks_after(graph, COSTS)
    return graph, after, schedule, read_schedule(graph.calls(), graph, schedule, after)


def operator_of(graph, name):
    return next(call.operator for call in graph.operators() if call.name == name)


def test_an_input_that_another_stream_reads_is_overwritten_too_early_by_npugraph_ex_and_that_is_noticed():
    graph, after, _, found = lower(INPUT, options={})
    assert operator_of(graph, "add") == "aten.add_.Tensor"
    with pytest.raises(ScheduleError, match="'add' may start before 'tanh' has ended"):
        verify_order(after, found)


def test_a_result_that_another_stream_reads_is_overwritten_by_npugraph_ex_and_that_is_noticed():
    graph, after, _, found = lower(RESULT, options={}, keeps=())
    assert operator_of(graph, "add") == "aten.add_.Tensor"
    with pytest.raises(ScheduleError, match="'add' may start before 'tanh' has ended"):
        verify_order(after, found)


@pytest.mark.parametrize("case", [INPUT, RESULT], ids=["input", "result"])
def test_with_its_passes_off_nothing_is_overwritten(case):
    graph, after, schedule, found = lower(case)
    assert operator_of(graph, "add") == "aten.add.Tensor"
    verify_order(after, found)
    assert found.streams == schedule.streams
    assert {*found.events} >= {*schedule.events}
    assert {*found.keeps} == {*schedule.keeps}


def test_every_one_of_its_passes_that_changes_operators_is_off():
    from npugraph_ex.configs.compiler_config import CompilerConfig

    open_session(PROFILE)
    on = {name for name, value in vars(CompilerConfig()).items() if name.startswith("remove_") or name.endswith("pass")}
    callbacks = {"post_grad_custom_pre_pass", "post_grad_custom_post_pass"}
    assert on - callbacks == {*AS_SCHEDULED}


def test_a_snapshot_of_what_is_written_later_stays_a_copy():
    """npugraph_ex would read the cache itself: its removal of copies does not look at writes in between."""

    def run(x):
        before = x.clone()
        x.add_(1)
        return (before * 2,)

    case = (run, (("enter", "clone", "add_", "mul", "return"),), (), ())
    graph, *_ = lower(case, options={**AS_SCHEDULED, "remove_noop_ops": True})
    assert "clone" not in {call.name for call in graph.operators()}
    graph, *_ = lower(case)
    given = torch.ones(4, 16)
    (got,) = graph.module(given)
    assert torch.equal(got, torch.full((4, 16), 2.0))
    assert torch.equal(given, torch.full((4, 16), 2.0))


def test_tensors_are_kept_for_the_streams_that_the_code_runs_on():
    """npugraph_ex looks labels up in another table than its code does, and would make a second stream there."""
    graph, *_ = lower(RESULT)
    from npugraph_ex.scope._scope_attr import _npu_get_or_create_stream_with_tag as kept_for

    start = graph.code.index("_GLOBAL_USER_TAG_TO_STREAM = {}")
    ours = graph.code.index("\nfrom npugraph_ex.scope._scope_attr import")
    for code, is_same in ((graph.code[start:ours], False), (graph.code[start:], True)):
        captured = object()
        seen = []
        names = {
            "torch": torch, "threading": threading, "assert_size_stride": lambda *_: None,
            "acl_graph": lambda *_, seen=seen: seen.append((kept_for("k31_stream_1"), kept_for("small.main"))),
            "aclgraph_cache_info": SimpleNamespace(
                user_stream_label={"k31_stream_1"}, user_stream_info={}, tagged_event_names=[], stream=captured
            ),
        }  # fmt: skip
        exec(code, names)
        for _ in range(2):
            names["kernel"](torch.zeros(4, 16))
        assert len(seen) == 2
        for side, main in seen:
            assert (side is names["_GLOBAL_USER_TAG_TO_STREAM"]["k31_stream_1"]) == is_same
            assert (main is captured) == is_same


def test_an_operator_whose_ge_converter_refuses_is_in_the_code():
    open_session(PROFILE)
    rows = torch.zeros(128, 4, 128, dtype=torch.bfloat16)
    inputs = [rows, rows, rows, rows[..., 0].contiguous(), torch.zeros(1, 4, 128, 128, dtype=torch.bfloat16),
              torch.full((1,), 128, dtype=torch.int32), torch.zeros(128, 4)]  # fmt: skip

    def run(query, key, value, beta, state, lengths, g):
        return torch.ops.npu.npu_chunk_gated_delta_rule(
            query, key, value, beta=beta, initial_state=state, actual_seq_lengths=lengths, scale=1.0, g=g
        )

    module = make_fx(run, tracing_mode="fake")(*inputs)
    assert generate(module, inputs, "small").counts() == {"npu.npu_chunk_gated_delta_rule.default": 1}
    with pytest.raises(RuntimeError, match="not supported in GE graph mode"):
        convert(module, inputs)


def updated_on_the_side(cache, x):
    cache.add_(torch.relu(x))
    return (torch.tanh(x),)


UPDATED = (
    updated_on_the_side,
    (("enter", "relu", "tanh", "return"), ("add_",)),
    (("relu", "add_"), ("add_", "return")),
    (("enter", 1), ("relu", 1), ("add_", 0)),
)


def run_late(case, found, inputs, late):
    """The program by threads, with the schedule that was read back; each task of one stream begins 50 ms late."""
    module = make_fx(case[0], tracing_mode="fake")(*inputs)
    watch = lambda stream, _: time.sleep(0.05) if stream == late else None  # noqa: E731
    run = ScheduledModule(module, found, poison=True, watch=watch)
    try:
        return run(*inputs)
    finally:
        run.close()


def test_the_caller_reads_what_a_late_side_stream_has_written():
    inputs = [torch.zeros(4, 16), torch.ones(4, 16)]
    graph, after, _, found = lower(UPDATED, inputs=inputs)
    verify_order(after, found)
    run_late(UPDATED, found, inputs, late=1)
    assert torch.equal(inputs[0], torch.ones(4, 16))
    joins = [call for call in graph.calls() if call.operator == WAIT and call.stream == ""]
    assert len(joins) == 1
    without = [call for call in graph.calls() if call not in joins]
    with pytest.raises(ScheduleError, match="'return' may start before 'add_' has ended"):
        verify_order(after, read_schedule(without, graph, found, after))


@pytest.mark.parametrize("late", [0, 1])
def test_what_crosses_streams_is_kept_in_both_directions(late):
    def run(x):
        made = torch.relu(x)
        there = torch.exp(made)
        back = torch.neg(there)
        return (torch.add(back, torch.tanh(x)),)

    case = (
        run,
        (("enter", "relu", "tanh", "neg", "add", "return"), ("exp",)),
        (("relu", "exp"), ("exp", "neg")),
        (("enter", 1), ("relu", 1), ("exp", 0)),
    )
    inputs = [torch.linspace(-1, 1, 64).reshape(4, 16)]
    graph, after, _, found = lower(case, inputs=inputs)
    verify_order(after, found)
    (got,) = run_late(case, found, inputs, late)
    assert torch.equal(got, run(*inputs)[0])
    assert sorted(graph.kept()) == [("exp", "small.main"), ("relu", "k31_stream_1")]
    calls = graph.calls()
    for kept in (call for call in calls if call.operator == KEEP):
        with pytest.raises(ScheduleError, match="may be freed before"):
            verify_order(after, read_schedule([c for c in calls if c is not kept], graph, found, after))


def test_a_result_of_several_is_kept_only_when_each_of_its_parts_is():
    def run(x):
        values, places = torch.sort(x)
        return values * 2, places + 1

    case = (
        run,
        (("enter", "sort", "return"), ("mul", "add")),
        (("sort", "mul"), ("add", "return")),
        (("enter", 1), ("sort", 1), ("mul", 0), ("add", 0)),
    )
    graph, after, _, found = lower(case)
    verify_order(after, found)
    calls = graph.calls()
    kept = [call for call in calls if call.operator == KEEP and call.arguments[1] == "k31_stream_1"]
    assert len(kept) == 2
    for one in kept:
        with pytest.raises(ScheduleError, match="the result of 'sort' may be freed"):
            verify_order(after, read_schedule([c for c in calls if c is not one], graph, found, after))


def test_a_dropped_event_is_noticed_and_tags_of_graphs_before_are_forgotten():
    graph, after, schedule, _ = lower(RESULT)
    calls = graph.calls()
    for operator in (RECORD, WAIT):
        at = next(i for i, c in enumerate(calls) if c.operator == operator and c.arguments[0] == "small.relu")
        with pytest.raises(ScheduleError, match=r"may start before|which is not recorded"):
            verify_order(after, read_schedule([*calls[:at], *calls[at + 1 :]], graph, schedule, after))
    moved = [replace(call, stream="") if call.name == "tanh" else call for call in calls]
    assert read_schedule(moved, graph, schedule, after).streams != schedule.streams
    again, *_ = lower(INPUT)
    assert "small.relu" not in again.code
