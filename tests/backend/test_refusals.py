"""The ten refusals that the documents show: each program keeps eager's numbers and gets one sentence with its line."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import k31compile

EXAMPLE = Path(__file__).parents[2] / "examples" / "refusals.py"
SAYS = {
    "indexer_without_relu": "the relu is missing",
    "indexer_with_relu_squared": "the relu is squared",
    "indexer_of_the_worst": "the smallest scores are selected",
    "indexer_whose_scores_are_kept": "the scores are also read",
    "attention_with_capped_logits": "it is not a softmax over the selected",
    "delta_rule_that_predicts_too_early": "its output differs from the gated delta rule",
    "delta_rule_that_keeps_its_decayed_state": "a value inside the recurrence, is also read by output (returned)",
    "router_with_the_bias_in_the_weights": "the weights of its experts are not those of",
    "router_with_another_score": "its scores are neither a sigmoid nor a softmax",
    "norm_with_a_tanh_gate": "its gate is tanh",
}


def loaded():
    spec = importlib.util.spec_from_file_location("refusals", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SAYS)
def test_a_near_miss_is_told_in_a_sentence_with_its_line(name):
    example = loaded()
    program = getattr(example, name)
    arguments = example.PROGRAMS[program]
    report = k31compile.explain(program, *arguments)
    nearest = str(report.near_misses_first()[0])
    assert SAYS[name] in nearest
    line = int(re.search(r"refusals\.py:(\d+)", nearest).group(1))
    first = program.__code__.co_firstlineno
    assert first < line <= max(line for *_, line in program.__code__.co_lines() if line)
    assert "; " in nearest  # what to do
    with torch.no_grad():
        torch._dynamo.reset()
        got = torch.compile(program, backend="k31", options={"codegen": "ops"})(*arguments)
    for ours, want in zip(_flat(got), _flat(program(*arguments)), strict=True):
        torch.testing.assert_close(ours, want)


def _flat(result):
    return result if isinstance(result, tuple) else (result,)


def test_there_are_ten():
    assert [program.__name__ for program in loaded().PROGRAMS] == list(SAYS)
