"""Regions in the GE graph: each enter has its exit in the same graph, with the operators in between (row G2)."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "examples")]

from ascend_decode import decode  # noqa: E402

from k31compile.offline import compile_offline  # noqa: E402
from k31compile.passes.schedule.cost_model import load_costs  # noqa: E402
from k31compile.passes.schedule.schedule import Schedule, SuperKernel  # noqa: E402
from k31compile.passes.schedule.tasks import Task, TaskGraph  # noqa: E402
from k31compile.targets.ascend.offline.convert import convert  # noqa: E402
from k31compile.targets.ascend.offline.session import open_session  # noqa: E402
from k31compile.targets.ascend.profiles import profile_of  # noqa: E402
from k31compile.targets.ascend.streams import write_streams  # noqa: E402
from k31compile.targets.ascend.super_kernels import first_symbolic, merge_launches  # noqa: E402

A3 = profile_of("ascend-a3")
FUSED = (("stream-fusion", "1"),)


@pytest.fixture(scope="module")
def compiled():
    """The example's decode step for A3, compiled once."""
    return compile_offline(decode(), "ascend-a3")


def scopes_around(graph):
    """For each node the scopes that are open where it stands; fails where an exit has no enter, or an enter no exit."""
    found, opened = {}, []
    for node in graph.nodes:
        if node.target is torch.ops.air.scope_enter.default:
            opened.append(dict(zip(*node.args, strict=True)))
        elif node.target is torch.ops.air.scope_exit.default:
            opened.pop()
        else:
            found[node.name] = {key: value for scope in opened for key, value in scope.items()}
    assert opened == []
    return found


def test_every_region_of_the_schedule_is_a_scope_with_its_operators_and_no_others(compiled):
    around = scopes_around(compiled.lowered.module.graph)
    regions = compiled.schedule.super_kernels
    assert regions
    for region in regions:
        assert {around[name].get("_super_kernel_scope") for name in region.tasks} == {region.name}
        options = {around[name]["_super_kernel_options"] for name in region.tasks}
        assert options == {":".join(f"{key}={value}" for key, value in region.options)}
    merged = {name for region in regions for name in region.tasks}
    others = [name for name in compiled.schedule.stream_of if name in around and name not in merged]
    assert all("_super_kernel_scope" not in around[name] for name in others)


def test_the_scopes_are_attributes_of_the_ge_operators(compiled):
    operators = compiled.ge.operators()
    regions = {region.name: region for region in compiled.schedule.super_kernels}
    assert {node.super_kernel for node in operators} - {""} == {*regions}
    for node in operators:
        if node.super_kernel:
            assert ("stream-fusion", "1") in regions[node.super_kernel].options or not node.super_kernel_options
    wide = {node.super_kernel for node in operators if node.super_kernel and node.super_kernel_options}
    assert wide == {name for name, region in regions.items() if region.options}


def test_the_report_counts_regions_and_launches(compiled):
    said = compiled.to_dict()["schedule"]["super_kernels"]
    assert said["regions"] == len(compiled.schedule.super_kernels)
    assert said["operators"] >= said["tasks"] // 2
    assert said["launches_after"] < said["launches_before"]
    assert said["predicted"] <= compiled.schedule.predicted
    assert said["why_none"] == ""


def test_the_option_and_the_product_decide():
    off = compile_offline(decode(), "ascend-a3", super_kernel=False)
    assert off.to_dict()["schedule"]["super_kernels"]["why_none"] == "the option super_kernel is off"
    assert {node.super_kernel for node in off.ge.operators()} == {""}
    other = compile_offline(decode(), "ascend-950")
    assert other.schedule.super_kernels == ()
    assert other.to_dict()["schedule"]["super_kernels"]["why_none"] == "GE merges no operators on ascend-950"


def six_operators():
    """relu, exp, neg, abs, tanh, sigmoid: each takes the one before it, and the sum of all but the last is added."""

    def run(x):
        a = torch.relu(x)
        b = torch.exp(a)
        c = torch.neg(b)
        d = torch.abs(c)
        e = torch.tanh(d)
        return (torch.sigmoid(e) + a,)

    return make_fx(run, tracing_mode="fake")(torch.zeros(4, 16))


NAMES = ("relu", "exp", "neg", "abs_1", "tanh", "sigmoid", "add")


def schedule_of(streams, events, regions):
    order = {name: (float(at), float(at)) for at, name in enumerate(NAMES)}
    return Schedule(streams, events, (), order, 0.0, 0.0, 0.0, 0.0, regions)


@pytest.mark.parametrize(
    ("streams", "events"),
    [
        pytest.param((NAMES,), (), id="one stream"),
        pytest.param(
            (("relu", "exp", "tanh", "sigmoid", "add"), ("neg", "abs_1")),
            (("exp", "neg"), ("abs_1", "tanh")),
            id="a switch inside",
        ),
        pytest.param(
            (("relu", "sigmoid", "add"), ("exp", "neg", "abs_1", "tanh")),
            (("relu", "exp"), ("tanh", "sigmoid")),
            id="begins and ends inside a stream",
        ),
    ],
)
def test_six_operators_in_one_scope_stay_there_whatever_the_streams(streams, events):
    open_session(A3)
    module = six_operators()
    region = SuperKernel("layer", ("neg", "abs_1", "tanh", "sigmoid"), FUSED)
    schedule = schedule_of(streams, events, (region,))
    assert schedule.issue_order() == NAMES
    write_streams(module, schedule)
    assert scopes_around(module.graph)["neg"]["_super_kernel_scope"] == "layer"
    ge = {node.type: node for node in convert(module, [torch.zeros(4, 16)]).operators()}
    inside = {"Neg", "Abs", "Tanh", "Sigmoid"}
    assert {name for name, node in ge.items() if node.super_kernel == "layer"} == inside
    assert {ge[name].super_kernel_options for name in inside} == {"stream-fusion=1"}
    for stream, names in enumerate(schedule.streams):
        for name in set(names) & {"exp", "neg", "tanh", "sigmoid"}:
            assert ge[name.capitalize()].stream == ("" if stream == 0 else f"k31_stream_{stream}")


def test_a_graph_of_unknown_sizes_has_none_and_says_why():
    module = make_fx(lambda x: (x * 2).relu().exp(), tracing_mode="symbolic")(torch.zeros(5, 3))
    name = next(node.name for node in module.graph.nodes if node.op == "placeholder")
    assert first_symbolic(module) == name
    costs = load_costs(A3.name)
    tasks = TaskGraph([Task(node.name, 4e-6, "vector") for node in module.graph.nodes if node.op == "call_function"])
    one = Schedule((tuple(tasks.places),), (), (), {}, 0.0, 0.0, 0.0, 0.0)
    found = merge_launches(module, tasks, one, costs, A3, is_wanted=True)
    assert found.schedule is one
    assert found.why_none == f"the size of {name} is not static, and GE merges static graphs alone"


def test_what_gains_nothing_is_told():
    module = six_operators()
    tasks = TaskGraph([Task(name, 1e-3, "vector") for name in NAMES])
    spans = {name: (place * 1e-3, (place + 1) * 1e-3) for place, name in enumerate(NAMES)}
    one = replace(schedule_of((NAMES,), (), ()), times=spans, predicted=7e-3, serial=7e-3)
    found = merge_launches(module, tasks, one, load_costs(A3.name), A3, is_wanted=True)
    assert found.why_none.startswith("no two launch-bound tasks")
