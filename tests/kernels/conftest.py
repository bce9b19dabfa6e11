"""What every kernel test shares: each implementation of an operator, one after the other."""

import pytest
import torch

import k31compile.kernels as kernels
from k31compile.kernels.cpu import loader
from k31compile.kernels.cpu.attn_res import prepare_provider, update_provider
from k31compile.kernels.cpu.gated_rms_norm import gated_rms_norm_provider
from k31compile.kernels.cpu.lightning_indexer import indexer_provider
from k31compile.kernels.cpu.short_conv import short_conv_provider
from k31compile.kernels.cpu.sparse_flash_attention import attention_provider

IMPLEMENTATIONS = ("cpu-fast", "cpu-portable", "cpu-wide", "reference")


def _pick(name, reference, make):
    if name == "reference":
        return reference
    variant = name.removeprefix("cpu-")
    usable, why = loader.available(variant)
    if not usable:
        pytest.skip(why)
    return make(variant).run


@pytest.fixture(params=IMPLEMENTATIONS)
def indexer(request):
    return _pick(request.param, kernels.lightning_indexer_reference, indexer_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def attention(request):
    return _pick(request.param, kernels.sparse_flash_attention_reference, attention_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def short_conv(request):
    return _pick(request.param, kernels.short_conv_reference, short_conv_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def gated_rms_norm(request):
    return _pick(request.param, kernels.gated_rms_norm_reference, gated_rms_norm_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def attn_res(request):
    """Both phases, as (prepare, update)."""
    prepare = _pick(request.param, kernels.attn_res_prepare_reference, prepare_provider)
    return prepare, _pick(request.param, kernels.attn_res_update_reference, update_provider)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
