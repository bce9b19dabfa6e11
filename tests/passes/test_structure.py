"""Each pass turns its before() into its expected(), structurally, and finds nothing more in its own result."""

import pytest
import torch
from captured import sketch
from isomorphic import difference
from programs import OPERANDS, PROGRAMS

from k31compile.options import Options
from k31compile.passes.pipeline import run_pipeline
from k31compile.passes.registry import all_passes

names = pytest.mark.parametrize("name", PROGRAMS)


def traced(program):
    return sketch(program, *OPERANDS.values()).module


def through(module):
    return run_pipeline(module, Options(), "cpu")


def test_every_pass_has_its_programs():
    assert {one.name for one in all_passes()} == set(PROGRAMS)


@names
def test_before_becomes_expected(name):
    before, expected = PROGRAMS[name]
    assert difference(through(traced(before))[0], traced(expected)) == ""


@names
def test_before_was_something_else(name):
    before, expected = PROGRAMS[name]
    assert difference(traced(before), traced(expected)) != ""


@names
def test_the_pass_itself_changed_one_place(name):
    stages = through(traced(PROGRAMS[name][0]))[1]
    assert {stage.run.name: stage.run.changed for stage in stages}[name] == 1
    assert not any(stage.undone or stage.result.refused for stage in stages)


@names
def test_a_second_run_changes_nothing(name):
    once, _ = through(traced(PROGRAMS[name][0]))
    twice, stages = through(once)
    assert [stage.run.changed for stage in stages] == [0] * len(stages)
    assert difference(once, twice) == ""


@names
def test_the_pipeline_leaves_its_argument_alone(name):
    module = traced(PROGRAMS[name][0])
    before = [node.format_node() for node in module.graph.nodes]
    through(module)
    assert [node.format_node() for node in module.graph.nodes] == before


def in_float64(value):
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.double(), requires_grad=False)
    return value.double() if value.is_floating_point() else value


@names
def test_the_results_agree_in_float64(name):
    """The graph of float64 operands, so that nothing but a wrong rewrite can differ."""
    program = PROGRAMS[name][0]
    operands = [in_float64(value) for value in OPERANDS.values()]
    rewritten, stages = through(sketch(program, *operands).module)
    assert any(stage.run.changed for stage in stages)
    rewritten.recompile()
    (got,) = rewritten(*operands)
    expected = program(*operands)
    if not expected.is_floating_point():
        got, expected = got.sort(-1).values, expected.sort(-1).values
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
