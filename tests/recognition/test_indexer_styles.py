"""Every spelling of the indexer is fused once and selects what its author's code selects."""

import pytest
import torch
from indexer_styles import STYLES, K, operands
from running import assert_same_sets, overlap, run
from stable_topk import stable_eager

PHASES = ("prefill", pytest.param("square", marks=pytest.mark.slow), "decode")
NAMES = list(STYLES)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", NAMES)
def test_style_is_fused_and_selects_the_same(name, phase):
    style = STYLES[name]
    result = run(style.fn, *operands(style.arguments, phase))
    assert result.fused == {"lightning_indexer": style.count}, result.reasons
    assert not result.refused
    if style.ordered:
        assert torch.equal(result.got, result.want)
    assert_same_sets(result.got, result.want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_style_in_float64(name):
    style = STYLES[name]
    result = run(style.fn, *operands(style.arguments, "prefill", torch.float64, seed=3))
    assert result.fused == {"lightning_indexer": style.count}, result.reasons
    assert_same_sets(result.got, result.want)


@pytest.mark.parametrize("name", NAMES)
def test_style_in_bfloat16_selects_as_in_float32(name):
    """k31 scores bf16 operands in fp32: what the author's code selects when it is run in fp32 on the same numbers."""
    style = STYLES[name]
    arguments = operands(style.arguments, "prefill", torch.bfloat16, seed=5)
    result = run(style.fn, *arguments)
    assert result.fused == {"lightning_indexer": style.count}, result.reasons
    wide = [a.float() if a.is_floating_point() else a for a in arguments]
    want = stable_eager(style.fn, *wide)
    assert want.shape[-1] == K
    assert overlap(result.got, want) >= 0.99
