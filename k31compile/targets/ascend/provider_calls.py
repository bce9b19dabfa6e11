"""Foreign functions as operators of a graph: the arguments of a k31 operator in, a provider's kernel inside.

A kernel that is called through Python cannot be traced, so each call is one operator with a fake; the package is
imported when it runs. Arguments are spelled as the provider's API pages spell them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k31compile.kernels.delta_checks import VALUE_FIRST
from k31compile.kernels.kda import kda_chunk_fake, kda_recurrent_fake
from k31compile.targets.ascend.providers import Function

RECURRENT_KDA = Function(
    "fla_npu.ops.ascendc", "recurrent_kda",
    ("q", "k", "v", "g", "beta", "initial_state", "layout", "scale", "output_final_state", "inplace_final_state",
     "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first"),
)  # fmt: skip
CHUNK_KDA_FWD = Function(
    "fla_npu.ops.ascendc", "chunk_kda_fwd",
    ("q", "k", "v", "g", "beta", "scale", "chunk_size", "layout", "initial_state", "output_final_state",
     "use_gate_in_kernel", "state_v_first"),
)  # fmt: skip
CHUNK = 64

_LIBRARY = torch.library.Library("k31_npu", "FRAGMENT")
_LIBRARY.define(
    "fla_recurrent_kda(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor initial_state, *, "
    "float scale=1.0, str state_layout='KV') -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "fla_chunk_kda(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor? initial_state=None, *, "
    "float scale=1.0, str state_layout='KV') -> (Tensor, Tensor)"
)


def _recurrent(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, initial_state: Tensor,
    *, scale: float = 1.0, state_layout: str = "KV",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    output, last = RECURRENT_KDA.load()(
        *_half(query, key, value), gate.float(), beta.float(), initial_state.contiguous(), layout="BSND", scale=scale,
        output_final_state=True, inplace_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False, state_v_first=state_layout == VALUE_FIRST,
    )  # fmt: skip
    return output.float(), last.float()


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    *, scale: float = 1.0, state_layout: str = "KV",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    output, last, *_ = CHUNK_KDA_FWD.load()(
        *_half(query, key, value), gate.float(), beta.float(), scale, CHUNK, layout="BSND",
        initial_state=None if initial_state is None else initial_state.float().contiguous(), output_final_state=True,
        use_gate_in_kernel=False, state_v_first=state_layout == VALUE_FIRST,
    )  # fmt: skip
    return output.float(), last.float()


def _half(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.bfloat16) for tensor in tensors]


def _register(name: str, run: Any, fake: Any) -> None:
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "PrivateUse1")
    _LIBRARY.impl(name, fake, "Meta")


_register("fla_recurrent_kda", _recurrent, kda_recurrent_fake)
_register("fla_chunk_kda", _chunk, kda_chunk_fake)
