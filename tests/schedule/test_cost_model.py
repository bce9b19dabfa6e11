"""The figures of each target: all there, all with a source, and used as they should be."""

import pytest

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.cost_model import Figure, known_targets, load_costs

UNITS = {
    "cube_flops": "FLOP/s",
    "vector_flops": "FLOP/s",
    "memory_bytes": "byte/s",
    "link_bytes": "byte/s",
    "launch": "s",
    "event": "s",
}


def test_the_targets():
    assert known_targets() == ["ascend-950", "ascend-a3", "cuda"]


@pytest.mark.parametrize("target", known_targets())
def test_every_figure_has_its_unit_and_says_where_it_comes_from(target):
    costs = load_costs(target)
    units = {**UNITS, "join": "s"} if costs.join else UNITS
    for name, unit in units.items():
        figure = getattr(costs, name)
        assert isinstance(figure, Figure)
        assert figure.unit == unit
        assert figure.value > 0
        kind = figure.source.partition(":")[0]
        assert kind in {"assumed", "announced", "reported", "datasheet"}
        assert len(figure.source) > 40, "one sentence"
        assert float(f"{figure.value:.3g}") == figure.value, "no more than three digits are known"


@pytest.mark.parametrize("target", known_targets())
def test_seconds_are_the_longer_of_computing_and_moving_after_the_launch(target):
    costs = load_costs(target)
    launch = costs.launch.value
    assert costs.seconds_of(0, 0, "memory") == launch
    assert costs.seconds_of(costs.cube_flops.value, 0, "cube") == launch + 1
    assert costs.seconds_of(costs.vector_flops.value, 1, "vector") == launch + 1
    assert costs.seconds_of(1, costs.memory_bytes.value, "cube") == launch + 1
    assert costs.seconds_of(0, costs.link_bytes.value, "communication") == launch + 1


def test_only_the_product_with_super_kernels_has_a_figure_for_a_step_inside_one():
    assert [target for target in known_targets() if load_costs(target).join] == ["ascend-a3"]
    costs = load_costs("ascend-a3")
    assert costs.join.value < costs.launch.value


def test_what_is_not_there_is_told_with_what_is():
    with pytest.raises(ScheduleError, match="no cost model for 'tpu'; known: ascend-950, ascend-a3, cuda"):
        load_costs("tpu")
    with pytest.raises(ScheduleError, match="no engine 'tensor'; known: cube"):
        load_costs("cuda").seconds_of(0, 0, "tensor")
    with pytest.raises(ScheduleError, match="give 0 or more"):
        load_costs("cuda").seconds_of(-1, 0, "cube")
