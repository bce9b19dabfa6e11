"""The formulas that are ours alone, against the operators' definitions in float64."""

import pytest
import torch

import k31compile.kernels  # noqa: F401  (registers the operators)
from k31compile.errors import TargetError
from k31compile.kernels.registry import OPERATORS
from k31compile.onnx_export.formulas import OURS, formula_of

BOUND = 1e-12


class Draw:
    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)


def delta_call(draw, layout, gate_of_a_head, with_state=True):
    batch, tokens, heads, width, depth = 2, 7, 3, 4, 5
    gate = -draw(batch, tokens, heads).abs() if gate_of_a_head else -draw(batch, tokens, heads, width).abs()
    state = draw(batch, heads, width, depth) if layout == "KV" else draw(batch, heads, depth, width)
    call = (draw(batch, tokens, heads, width), draw(batch, tokens, heads, width), draw(batch, tokens, heads, depth),
            gate, draw(batch, tokens, heads).sigmoid())  # fmt: skip
    return (*call, state) if with_state else call


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("operator", ["kda_recurrent", "kda_chunk", "gated_delta_recurrent", "gated_delta_chunk"])
def test_the_delta_rule_as_a_scan(operator, layout):
    call = delta_call(Draw(), layout, operator.startswith("gated"))
    options = {"scale": 0.5, "state_layout": layout}
    for got, expected in zip(
        OURS[operator](*call, **options), OPERATORS[operator].reference(*call, **options), strict=True
    ):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=BOUND, atol=BOUND)


def test_the_delta_rule_without_a_state():
    call = delta_call(Draw(1), "KV", gate_of_a_head=False, with_state=False)
    for got, expected in zip(OURS["kda_chunk"](*call), OPERATORS["kda_chunk"].reference(*call), strict=True):
        torch.testing.assert_close(got, expected, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("tail", ["minus_one", "lowest"])
@pytest.mark.parametrize("order", ["position", "score"])
def test_an_indexer_whose_rows_see_less_than_they_choose(order, tail):
    draw = Draw(2)
    query, key, weights = draw(2, 6, 3, 8), draw(2, 6, 1, 8), draw(2, 6, 3)
    options = {"sparse_count": 4, "order": order, "tail": tail}
    expected = OPERATORS["lightning_indexer"].reference(query, key, weights, **options)
    assert torch.equal(OURS["lightning_indexer"](query, key, weights, **options), expected)
    assert (expected == -1).any() == (tail == "minus_one")


def test_sequences_of_any_length_are_refused():
    call = delta_call(Draw(), "KV", gate_of_a_head=False)
    with pytest.raises(TargetError, match="kda_chunk with cu_seqlens cannot become an ONNX function"):
        formula_of("kda_chunk", call, {"cu_seqlens": torch.tensor([0, 7])})
