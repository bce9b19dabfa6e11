"""What the generators draw is their operator in somebody's words, or with its one lie is not."""

import sys
from dataclasses import replace
from pathlib import Path

import generate
import generate_attentions
import generate_chunks
import generate_convs
import generate_depths
import generate_experts
import generate_indexers
import generate_norms
import generate_routers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import difference, expect, run
from operands import operands
from torch.utils._pytree import tree_flatten

sys.path.insert(0, str(Path(__file__).parents[1] / "recognition"))

from stable_topk import stable_eager

DRAWS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
DELTA = [generate, generate_chunks]
OTHERS = [
    generate_routers,
    generate_experts,
    generate_indexers,
    generate_depths,
    generate_convs,
    generate_norms,
    generate_attentions,
]
FORMS = [*DELTA, *OTHERS]
EACH_AXIS = [pytest.param(form, axis, id=f"{form.__name__}-{axis}") for form in FORMS for axis in form.AXES]
EACH_LIE = [
    pytest.param(form, lie, axis, option, id=f"{form.__name__}-{lie}-{option}")
    for form in FORMS
    for lie in form.LIES
    for axis, option in ([("beta", option) for option in form.AXES["beta"]] if form in DELTA else [("", "all")])
]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


def plain(form):
    return {axis: options[0] for axis, options in form.AXES.items()}


def results(program, seed=0):
    """What the program gives, with a rule for equal scores, and what its operator would."""
    (length,) = program.lengths
    ruled = replace(program, fn=lambda *arguments: stable_eager(program.fn, *arguments))
    return run(ruled, length, seed), expect(program, length, seed)


def off(program, seed=0):
    return difference(*results(program, seed))


@each_form
@DRAWS
@given(data=st.data())
def test_a_drawn_spelling_is_its_operator(form, data):
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


@pytest.mark.parametrize(("form", "lie", "axis", "option"), EACH_LIE)
def test_each_lie_is_one_under_every_choice(form, lie, axis, option):
    """Under every place of beta at every length; for what is quick under every choice of every axis."""
    others = {"length": form.AXES["length"]} if axis else form.AXES
    for other, options in others.items():
        for one in options:
            program = form.compose(plain(form) | ({axis: option} if axis else {}) | {other: one}, lie)
            got, want = results(program, 2)
            assert difference(got, want) > 1e-3, one
            for name in program.right:
                assert difference({name: in_order(got, name)}, {name: in_order(want, name)}) < 1e-10, one


def in_order(results, name):
    """A result by itself, experts in the order of their numbers: top-k may be told not to sort them."""
    return results[name].sort(-1).values if name == "experts" else results[name]


@pytest.mark.slow
@each_form
@settings(DRAWS, max_examples=12)
@given(data=st.data())
def test_dynamo_takes_a_drawn_spelling_whole(form, data):
    program = data.draw(form.spellings)
    torch._dynamo.reset()
    captured = replace(program, fn=torch.compile(program.fn, backend="eager", fullgraph=True))
    (length,) = program.lengths
    # Beside itself in eager: which of equal scores a top-k keeps is its own business, not the definition's.
    as_written = run(program, length, 0, torch.float32)
    assert difference(run(captured, length, 0, torch.float32), as_written) < 2e-5


@pytest.mark.parametrize(("form", "axis"), EACH_AXIS)
def test_a_drawn_program_does_not_write_into_its_operands(form, axis):
    for option in form.AXES[axis]:
        program = form.compose(plain(form) | {axis: option})
        given_, fresh = operands(program, *program.lengths), operands(program, *program.lengths)
        program.fn(*given_)
        before = tree_flatten(fresh)[0]
        for i, after in enumerate(tree_flatten(given_)[0]):
            assert not isinstance(after, torch.Tensor) or torch.equal(after, before[i]), option
