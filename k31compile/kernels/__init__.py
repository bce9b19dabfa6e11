"""The ``k31::`` operators: schema, fake, reference (the definition), and faster providers beside it.

Importing this package registers the operators; nothing is compiled until the first call that wants it.
"""

if not __name__.startswith("k31compile."):
    # The repository root holds a link of this name: imported through it, every operator would be defined twice.
    raise ImportError(f"import k31compile.kernels instead of {__name__}")

from k31compile.kernels.attn_res import attn_res_prepare_reference, attn_res_update_reference
from k31compile.kernels.gated_delta import gated_delta_chunk_reference, gated_delta_recurrent_reference
from k31compile.kernels.gated_rms_norm import gated_rms_norm_reference
from k31compile.kernels.grouped_experts import grouped_experts_reference
from k31compile.kernels.kda import kda_chunk_reference, kda_recurrent_reference
from k31compile.kernels.lightning_indexer import lightning_indexer_reference
from k31compile.kernels.mega_kda import mega_kda_reference
from k31compile.kernels.moe_gating_top_k import moe_gating_top_k_reference
from k31compile.kernels.programs import OpenProgram, Program
from k31compile.kernels.registry import OPERATORS, Operator, Provider, provider_for
from k31compile.kernels.short_conv import short_conv_reference
from k31compile.kernels.skinny_linear import skinny_linear_reference
from k31compile.kernels.sparse_flash_attention import sparse_flash_attention_reference

__all__ = [
    "OPERATORS",
    "OpenProgram",
    "Operator",
    "Program",
    "Provider",
    "attn_res_prepare_reference",
    "attn_res_update_reference",
    "gated_delta_chunk_reference",
    "gated_delta_recurrent_reference",
    "gated_rms_norm_reference",
    "grouped_experts_reference",
    "kda_chunk_reference",
    "kda_recurrent_reference",
    "lightning_indexer_reference",
    "mega_kda_reference",
    "moe_gating_top_k_reference",
    "provider_for",
    "short_conv_reference",
    "skinny_linear_reference",
    "sparse_flash_attention_reference",
]
