"""What the generators draw is the delta rule, in steps or in chunks, or with its one lie is not."""

from dataclasses import replace

import generate
import generate_chunks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import difference, expect, run
from operands import operands

DRAWS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
FORMS = [generate, generate_chunks]
EACH_AXIS = [pytest.param(form, axis, id=f"{form.__name__}-{axis}") for form in FORMS for axis in form.AXES]
EACH_LIE = [
    pytest.param(form, lie, beta, id=f"{form.__name__}-{lie}-{beta}")
    for form in FORMS
    for lie in form.LIES
    for beta in form.AXES["beta"]
]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


def plain(form):
    return {axis: options[0] for axis, options in form.AXES.items()}


def off(program, seed=0):
    (length,) = program.lengths
    return difference(run(program, length, seed), expect(program, length, seed))


@each_form
@DRAWS
@given(data=st.data())
def test_a_drawn_spelling_is_the_delta_rule(form, data):
    program = data.draw(form.spellings)
    assert off(program) < 1e-10, program.peculiar


@each_form
@DRAWS
@given(data=st.data())
def test_a_drawn_near_miss_is_not(form, data):
    program = data.draw(form.near_misses)
    assert off(program) > 1e-3, program.peculiar


@pytest.mark.parametrize(("form", "axis"), EACH_AXIS)
def test_each_choice_of_an_axis_is_right_by_itself(form, axis):
    for option in form.AXES[axis]:
        assert off(form.compose(plain(form) | {axis: option}), seed=1) < 1e-10, option


@pytest.mark.parametrize(("form", "lie", "beta"), EACH_LIE)
def test_each_lie_is_one_under_every_place_of_beta(form, lie, beta):
    for length in form.AXES["length"]:
        program = form.compose(plain(form) | {"beta": beta, "length": length}, lie)
        got, want = run(program, length, 2), expect(program, length, 2)
        assert difference(got, want) > 1e-3, length
        assert all(difference({name: got[name]}, {name: want[name]}) < 1e-10 for name in program.right)


@pytest.mark.slow
@each_form
@settings(DRAWS, max_examples=12)
@given(data=st.data())
def test_dynamo_takes_a_drawn_spelling_whole(form, data):
    program = data.draw(form.spellings)
    torch._dynamo.reset()
    captured = replace(program, fn=torch.compile(program.fn, backend="eager", fullgraph=True))
    (length,) = program.lengths
    assert difference(run(captured, length, 0, torch.float32), expect(program, length, 0, torch.float32)) < 2e-5


@each_form
def test_a_drawn_program_does_not_write_into_its_operands(form):
    for output in form.AXES["output"]:
        program = form.compose(plain(form) | {"output": output})
        given_, fresh = operands(program, *program.lengths), operands(program, *program.lengths)
        program.fn(*given_)
        assert all(torch.equal(after, before) for after, before in zip(given_, fresh, strict=True))
