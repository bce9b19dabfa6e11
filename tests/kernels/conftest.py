"""What every kernel test shares: each implementation of an operator, one after the other."""

import os
import sys
from pathlib import Path

import pytest
import torch

import k31compile.kernels as kernels
from k31compile.kernels.cpu import loader
from k31compile.kernels.cpu.attn_res import prepare_provider, update_provider
from k31compile.kernels.cpu.delta_rule import chunk_provider, recurrent_provider
from k31compile.kernels.cpu.gated_rms_norm import gated_rms_norm_provider
from k31compile.kernels.cpu.grouped_experts import experts_provider
from k31compile.kernels.cpu.lightning_indexer import indexer_provider
from k31compile.kernels.cpu.mega_kda import mega_kda_provider
from k31compile.kernels.cpu.moe_gating_top_k import gating_provider
from k31compile.kernels.cpu.short_conv import short_conv_provider
from k31compile.kernels.cpu.skinny_linear import skinny_linear_provider
from k31compile.kernels.cpu.sparse_flash_attention import attention_provider
from k31compile.kernels.gated_delta import scalar_gated_provider

sys.path.insert(0, str(Path(__file__).parent))  # delta_cases

# test_aarch64.py runs these tests once more, with kernels of another architecture.
IMPLEMENTATIONS = tuple(
    os.environ.get("K31_TEST_IMPLEMENTATIONS", "cpu-fast cpu-portable cpu-avx2 cpu-wide reference").split()
)


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
def recurrent(request):
    return _pick(request.param, kernels.kda_recurrent_reference, recurrent_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def chunk(request):
    return _pick(request.param, kernels.kda_chunk_reference, chunk_provider)


FORMS = {"recurrent": recurrent_provider, "chunk": chunk_provider}
EITHER_FORM = [f"{form}-{name}" for form in FORMS for name in IMPLEMENTATIONS]


@pytest.fixture(params=EITHER_FORM)
def delta(request):
    """kda_recurrent or kda_chunk, called by the arguments that both have."""
    form, _, name = request.param.partition("-")
    return _pick(name, getattr(kernels, f"kda_{form}_reference"), FORMS[form])


@pytest.fixture(params=EITHER_FORM)
def gated_delta(request):
    """gated_delta_recurrent or gated_delta_chunk, called by the arguments that both have."""
    form, _, name = request.param.partition("-")
    reference = getattr(kernels, f"gated_delta_{form}_reference")
    return _pick(name, reference, lambda variant: scalar_gated_provider(FORMS[form](variant)))


@pytest.fixture(params=IMPLEMENTATIONS)
def gating(request):
    return _pick(request.param, kernels.moe_gating_top_k_reference, gating_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def experts(request):
    return _pick(request.param, kernels.grouped_experts_reference, experts_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def short_conv(request):
    return _pick(request.param, kernels.short_conv_reference, short_conv_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def gated_rms_norm(request):
    return _pick(request.param, kernels.gated_rms_norm_reference, gated_rms_norm_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def skinny_linear(request):
    return _pick(request.param, kernels.skinny_linear_reference, skinny_linear_provider)


@pytest.fixture(params=IMPLEMENTATIONS)
def mega_kda(request):
    return _pick(request.param, kernels.mega_kda_reference, mega_kda_provider)


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
