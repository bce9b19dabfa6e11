"""Drawn spellings are fused and drawn near misses never mistaken: few of each, in slow tests many."""

import sys
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
from drawn_programs import hold_near_miss, hold_spelling

DELTA = ("kda_recurrent", "kda_chunk", "gated_delta_recurrent", "gated_delta_chunk")
# What is fused, how many are drawn and how many in the slow tests; the costly are drawn less.
FORMS = {
    generate: (DELTA, 40, 500),
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
