"""Weights of the 950's indexer: what was widened is taken back, float32 is split, and nothing else is rounded."""

import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import k31compile.kernels  # noqa: F401  (registers the operators)
from k31compile.kernels.registry import OPERATORS
from k31compile.targets.ascend.constraints import indexer_heads
from k31compile.targets.ascend.indexer_weights import narrow_indexer_weights
from k31compile.targets.ascend.lowerings.attention import _heads_of_the_product, bfloat16_parts
from k31compile.targets.ascend.profiles import PROFILES

A3, P950 = PROFILES["ascend-a3"], PROFILES["ascend-950"]
QUERY, KEY = torch.randn(1, 2, 4, 8), torch.randn(1, 9, 1, 8)
WEIGHTS = torch.randn(1, 2, 4).to(torch.bfloat16)


def graph_of(widen, mask=None):
    """The traced graph of an indexer whose weights `widen` made of bfloat16 ones."""

    def program(query, key, weights, *masks):
        return torch.ops.k31.lightning_indexer(
            query, key, widen(weights), sparse_count=3, sparse_mode=0, mask=masks[0] if masks else None
        )

    return make_fx(program, tracing_mode="fake")(QUERY, KEY, WEIGHTS, *([] if mask is None else [mask]))


def weights_of(module):
    (call,) = module.graph.find_nodes(op="call_function", target=torch.ops.k31.lightning_indexer.default)
    return call.args[2]


WIDENED = {
    "cast": lambda w: w.float(),
    "scaled": lambda w: w.float() * 0.3 / 7,
    "viewed": lambda w: (w.reshape(2, 4).float() * 2).view(1, 2, 4),
}


@pytest.mark.parametrize("name", WIDENED)
def test_what_was_only_widened_and_scaled_is_taken_as_it_was(name):
    module = graph_of(WIDENED[name])
    before = module(QUERY, KEY, WEIGHTS)
    assert narrow_indexer_weights(module, P950) == 1
    assert weights_of(module).meta["val"].dtype == torch.bfloat16
    assert torch.equal(module(QUERY, KEY, WEIGHTS), before)


KEPT = {
    "a product in float32": lambda w: w.float() @ w.float().mT @ w.float(),
    "a negative factor": lambda w: w.float() * -1,
    "a factor of zero": lambda w: w.float() * 0,
    "a tensor as a factor": lambda w: w.float() * w.float(),
    "a sum": lambda w: w.float() + 1,
}


@pytest.mark.parametrize("name", KEPT)
def test_what_was_computed_in_float32_stays(name):
    module = graph_of(KEPT[name])
    assert narrow_indexer_weights(module, P950) == 0
    assert weights_of(module).meta["val"].dtype == torch.float32


def test_a_mask_that_is_added_keeps_the_scale():
    mask = torch.zeros(1, 2, 9)
    assert narrow_indexer_weights(graph_of(WIDENED["scaled"], mask), P950) == 0
    assert narrow_indexer_weights(graph_of(WIDENED["cast"], mask), P950) == 1
    assert narrow_indexer_weights(graph_of(WIDENED["scaled"], mask == 0), P950) == 1


def test_a_product_that_takes_float32_is_given_it():
    assert narrow_indexer_weights(graph_of(WIDENED["cast"]), A3) == 0


def test_three_parts_add_up_to_the_weight_bit_by_bit():
    generator = torch.Generator().manual_seed(0)
    for exponent in range(-60, 60, 3):
        x = torch.randn(999, generator=generator) * 2.0**exponent
        parts = bfloat16_parts(x)
        assert all(part.dtype == torch.bfloat16 for part in parts)
        assert torch.equal(sum(part.double() for part in parts), x.double())


@pytest.mark.parametrize(("heads", "dtype", "used"), [(8, torch.float32, 24), (1, torch.float32, 8),
                         (21, torch.float32, 64), (22, torch.float32, None), (64, torch.bfloat16, 64),
                         (12, torch.bfloat16, 16), (65, torch.bfloat16, None)])  # fmt: skip
def test_the_heads_that_the_950_is_called_with(heads, dtype, used):
    assert indexer_heads(P950, heads, dtype) == used


@pytest.mark.parametrize("heads", [1, 8, 12, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_of_the_950_select_what_the_model_does(heads, dtype):
    generator = torch.Generator().manual_seed(heads)
    query, key = (torch.randn(2, n, h, 16, generator=generator).bfloat16() for n, h in ((3, heads), (40, 1)))
    weights = torch.randn(2, 3, heads, generator=generator).to(dtype)
    reference, options = OPERATORS["lightning_indexer"].reference, {"sparse_count": 7, "sparse_mode": 0}
    wide_query, narrow = _heads_of_the_product(P950, query, weights)
    assert narrow.dtype == torch.bfloat16
    assert wide_query.shape[2] == narrow.shape[2] in (8, 16, 24, 32, 64)
    assert torch.equal(
        reference(wide_query.double(), key.double(), narrow.double(), **options),
        reference(query.double(), key.double(), weights.double(), **options),
    )


def test_whoever_allows_rounding_gets_one_part():
    rounding = dataclasses.replace(P950, may_round=True)
    assert indexer_heads(rounding, 64, torch.float32) == 64
    _, weights = _heads_of_the_product(rounding, torch.randn(1, 1, 64, 128), torch.randn(1, 1, 64))
    assert weights.shape == (1, 1, 64)
    assert weights.dtype == torch.bfloat16
