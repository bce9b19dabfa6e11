"""What the generator draws is the delta rule, or with its one lie is not."""

from dataclasses import replace

import pytest
import torch
from generate import AXES, LIES, compose, near_misses, spellings
from hypothesis import given, settings
from judging import difference, expect, run
from operands import operands

DRAWS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
PLAIN = {axis: options[0] for axis, options in AXES.items()}


def off(program, seed=0):
    (length,) = program.lengths
    return difference(run(program, length, seed), expect(program, length, seed))


@DRAWS
@given(spellings)
def test_a_drawn_spelling_is_the_delta_rule(program):
    assert off(program) < 1e-10, program.peculiar


@DRAWS
@given(near_misses)
def test_a_drawn_near_miss_is_not(program):
    assert off(program) > 1e-3, program.peculiar


@pytest.mark.parametrize("axis", AXES)
def test_each_choice_of_an_axis_is_right_by_itself(axis):
    for option in AXES[axis]:
        assert off(compose(PLAIN | {axis: option}), seed=1) < 1e-10, option


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("beta", AXES["beta"])
def test_each_lie_is_one_under_every_place_of_beta(lie, beta):
    for length in AXES["length"]:
        program = compose(PLAIN | {"beta": beta, "length": length}, lie)
        got, want = run(program, length, 2), expect(program, length, 2)
        assert difference(got, want) > 1e-3, length
        assert all(difference({name: got[name]}, {name: want[name]}) < 1e-10 for name in program.right)


@pytest.mark.slow
@settings(DRAWS, max_examples=12)
@given(spellings)
def test_dynamo_takes_a_drawn_spelling_whole(program):
    torch._dynamo.reset()
    captured = replace(program, fn=torch.compile(program.fn, backend="eager", fullgraph=True))
    (length,) = program.lengths
    assert difference(run(captured, length, 0, torch.float32), expect(program, length, 0, torch.float32)) < 2e-5


def test_a_drawn_program_does_not_write_into_its_operands():
    for output in AXES["output"]:
        program = compose(PLAIN | {"length": 4, "output": output})
        given_, fresh = operands(program, 4), operands(program, 4)
        program.fn(*given_)
        assert all(torch.equal(after, before) for after, before in zip(given_, fresh, strict=True))
