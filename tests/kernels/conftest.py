"""What every kernel test shares: each implementation of an operator, one after the other."""

import pytest
import torch

import k31compile.kernels as kernels
from k31compile.kernels.cpu import loader
from k31compile.kernels.cpu.grouped_experts import experts_provider
from k31compile.kernels.cpu.lightning_indexer import indexer_provider
from k31compile.kernels.cpu.moe_gating_top_k import gating_provider
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
def gating(request):
    return _pick(request.param, kernels.moe_gating_top_k_reference, gating_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def experts(request):
    return _pick(request.param, kernels.grouped_experts_reference, experts_provider)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
