"""Drawn spellings of the delta rule are fused, near misses never mistaken: few of each, in slow tests up to 500."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))
sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))

import generate
import generate_chunks
from captured import operators, sketch
from judging import difference
from operands import operands

from k31compile.options import Options
from k31compile.passes.pipeline import run_pipeline

FAMILY = ("k31.kda_recurrent", "k31.kda_chunk", "k31.gated_delta_recurrent", "k31.gated_delta_chunk")
FUSE = tuple(name.removeprefix("k31.") for name in FAMILY)
BOUND = 2e-5
QUIET = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
FEW = {generate: settings(max_examples=40, **QUIET), generate_chunks: settings(max_examples=6, **QUIET)}
"""A drawn chunk form takes as long as six drawn steps."""
MANY = {generate: settings(max_examples=500, **QUIET), generate_chunks: settings(max_examples=120, **QUIET)}


def rewritten(program):
    """What of the family is in the rewritten graph, and how far its numbers are from the program's own."""
    (length,) = program.lengths
    arguments = operands(program, length, torch.float32, 0)
    module, _ = run_pipeline(sketch(program.fn, *arguments).module, Options(fuse=FUSE), "cpu")
    with torch.no_grad():
        got, want = module(*arguments), program.fn(*arguments)
    names = program.results
    got, want = (values if isinstance(values, tuple) else (values,) for values in (got, want))
    error = difference(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))
    return Counter(name for name in operators(module) if name in FAMILY), error


def hold_spelling(program):
    found, error = rewritten(program)
    assert found == {f"k31.{program.operator}": 1}, program.peculiar
    assert error < BOUND, program.peculiar


def hold_near_miss(program):
    """The author's numbers stay; the operator appears only where other operands make it right."""
    found, error = rewritten(program)
    assert error < BOUND, program.peculiar
    assert not (found and program.excluded), program.peculiar


each_form = pytest.mark.parametrize("form", [generate, generate_chunks], ids=lambda form: form.__name__)


@each_form
def test_a_drawn_spelling_is_fused(form):
    FEW[form](given(form.spellings)(hold_spelling))()


@each_form
def test_a_drawn_near_miss_is_not_mistaken(form):
    FEW[form](given(form.near_misses)(hold_near_miss))()


@pytest.mark.slow
@each_form
def test_many_drawn_spellings_are_fused(form):
    MANY[form](given(form.spellings)(hold_spelling))()


@pytest.mark.slow
@each_form
def test_many_drawn_near_misses_are_not_mistaken(form):
    MANY[form](given(form.near_misses)(hold_near_miss))()
