"""The mutation test of the delta rule's confirmation, on spellings of the corpus."""

import sys
from pathlib import Path

import pytest
import torch
from test_mutation import fates, hold

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))

import catalogue
from mutation import traced
from operands import operands

from k31compile.passes.recognise.delta_rule import DeltaRuleRecogniser

STEPS = (("straight_line_step", 1), ("value_rows", 5), ("beta_on_value_and_key", 5), ("base_two", 5))
CHUNKS = (("triangular_solve", 48), ("middle_anchor", 48), ("masked_after_the_sum", 48))


def graph_of(name, length):
    """The traced graph of a spelling, and fresh inputs: other seeds, sizes of values and states, stronger gates."""
    program = catalogue.SPELLINGS[name]
    module, order = traced(program.fn, operands(program, length, torch.float64))
    fresh = []
    for seed, factors in enumerate(({}, {}, {"v": 1e3}, {"q": 1e-3}, {"s0": 30.0}, {"g": 3.0}, {"g": 0.0}), start=20):
        arguments = operands(program, length, torch.float64, seed)
        for i, argument in enumerate(program.arguments):
            arguments[i] = arguments[i] * factors.get(argument.partition("_")[0], 1.0)
        fresh.append([arguments[i] for i in order])
    return module, fresh


@pytest.mark.parametrize(("name", "length"), STEPS[:1])
def test_sampled_mutants_of_steps(name, length):
    hold(fates(*graph_of(name, length), DeltaRuleRecogniser("kda_recurrent"), every=7), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), STEPS)
def test_all_mutants_of_steps(name, length):
    every = 1 if length == 1 else 4
    hold(fates(*graph_of(name, length), DeltaRuleRecogniser("kda_recurrent"), every=every), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), CHUNKS)
def test_all_mutants_of_chunks(name, length):
    hold(fates(*graph_of(name, length), DeltaRuleRecogniser("kda_chunk"), every=3), 0.4)
