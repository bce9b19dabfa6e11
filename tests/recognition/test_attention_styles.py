"""Every spelling of sparse attention behind an indexer: both are fused, and the numbers are the author's."""

import pytest
import torch
from attention_styles import STYLES, operands
from running import relative_error, run

PHASES = ("prefill", pytest.param("square", marks=pytest.mark.slow), "decode")
NAMES = list(STYLES)
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


def check(name, phase, dtype, seed):
    style = STYLES[name]
    result = run(style.fn, *operands(style.arguments, phase, dtype, seed))
    fused = {key: count for key, count in result.fused.items() if key != "static_top_k"}
    assert fused == {"lightning_indexer": 1, "sparse_flash_attention": 1}, result.reasons
    assert not result.refused
    assert result.got.shape == result.want.shape
    assert relative_error(result.got, result.want) <= BOUNDS[dtype]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", NAMES)
def test_style_is_fused_and_gives_the_same(name, phase):
    check(name, phase, torch.float32, seed=1)


@pytest.mark.parametrize("name", NAMES)
def test_style_in_float64(name):
    check(name, "prefill", torch.float64, seed=2)
