"""What the generator draws is the delta rule, or with its one lie is not."""

import pytest
import torch
from generate import AXES, LIES, compose, near_misses, spellings
from hypothesis import given, settings
from judging import difference, expect, run

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
        assert off(compose(PLAIN | {"beta": beta, "length": length}, lie), seed=2) > 1e-3, length


def test_a_drawn_program_does_not_write_into_its_operands():
    program = compose(PLAIN | {"length": 4, "output": "filled"})
    want = expect(program, 4, 0)
    assert set(want) == {"o", "state"}
    assert torch.equal(run(program, 4, 0)["o"], run(program, 4, 0)["o"])
