"""Drawn spellings are fused and drawn near misses never mistaken: few of each, in slow tests many."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))

import generate
import generate_attentions
import generate_chunks
import generate_convs
import generate_depths
import generate_experts
import generate_indexers
import generate_norms
import generate_routers
import operands
from drawn_programs import hold_near_miss, hold_spelling

DELTA = ("kda_recurrent", "kda_chunk", "gated_delta_recurrent", "gated_delta_chunk")
# What is fused, how many are drawn and how many in the slow tests; the costly are drawn less.
FORMS = {
    generate: (DELTA, 16, 500),
    generate_chunks: (DELTA, 6, 120),
    generate_routers: ("all", 20, 500),
    generate_experts: ("all", 5, 120),
    generate_indexers: ("all", 12, 120),
    generate_depths: ("all", 10, 120),
    generate_convs: ("all", 10, 120),
    generate_norms: ("all", 20, 500),
    generate_attentions: ("all", 10, 120),
}
QUIET = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


def hold(form, programs, judge, few=True):
    fuse, small, large = FORMS[form]

    def judge_one(program):
        judge(program, fuse)

    settings(max_examples=small if few else large, **QUIET)(given(programs)(judge_one))()


@each_form
def test_a_drawn_spelling_is_fused(form):
    hold(form, form.spellings, hold_spelling)


@each_form
def test_a_drawn_near_miss_is_not_mistaken(form):
    hold(form, form.near_misses, hold_near_miss)


@pytest.mark.slow
@each_form
def test_many_drawn_spellings_are_fused(form):
    hold(form, form.spellings, hold_spelling, few=False)


@pytest.mark.slow
@each_form
def test_many_drawn_near_misses_are_not_mistaken(form):
    hold(form, form.near_misses, hold_near_miss, few=False)


@pytest.fixture
def one_request(monkeypatch):
    """Operands of one request instead of two: with one token of it a sample has one row."""
    monkeypatch.setattr(operands, "B", 1)


JOINT = {"form": "joint", "chosen": "given with marks", "kept": "by rows", "dots": "einsum", "length": 1}
LATENT = {"form": "latent", "chosen": "given with marks", "kept": "by rows", "dots": "matmul", "length": 1}
ROPE = {"form": "with rope", "chosen": "given with marks", "kept": "by rows", "dots": "einsum", "length": 1}
ONE_TOKEN = {
    "the end of the keys, lowest": (JOINT | {"hidden": "lowest", "scale": "behind the dots"}, None),
    "the end of the keys, behind the mask": (JOINT | {"hidden": "masked_fill", "scale": "behind the mask"}, None),
    "the end of the keys, on q": (LATENT | {"hidden": "where", "scale": "on q"}, "a temperature for each head"),
    "a slot": (ROPE | {"hidden": "masked_fill", "scale": "behind the dots"}, "last choice left out"),
}


def first_options(form):
    return {axis: options[0] for axis, options in form.AXES.items()}


@pytest.mark.parametrize("name", ONE_TOKEN)
def test_one_token_is_not_mistaken(name, one_request):
    """Each of these was fused as something else by too few rows of samples."""
    choice, lie = ONE_TOKEN[name]
    program = generate_attentions.compose(first_options(generate_attentions) | choice, lie)
    (hold_near_miss if lie else hold_spelling)(replace(program, lengths=(1,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [form for form, (fuse, *_) in FORMS.items() if fuse == "all"], ids=lambda f: f.__name__
)
def test_many_drawn_programs_of_one_token(form, one_request):
    spellings = form.spellings.map(lambda program: replace(program, lengths=(1,)))
    near_misses = form.near_misses.map(lambda program: replace(program, lengths=(1,)))
    settings(max_examples=60, **QUIET)(given(spellings)(lambda program: hold_spelling(program)))()
    settings(max_examples=120, **QUIET)(given(near_misses)(lambda program: hold_near_miss(program)))()
