"""The C structures that the kernels take, field by field as in cpu/*.h, and how tensors enter them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from k31compile.errors import OperatorError
from k31compile.kernels.visibility import CAUSAL

OK, BAD_BLOCK, BAD_INDEX, NO_MEMORY = range(4)
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MASK_DTYPES = {**DTYPES, torch.bool: 2}
ACTIVATIONS = {"none": 0, "sigmoid": 1, "silu": 2}
WEIGHT_CASTS = {"before": 0, "after": 1, "between": 2}


def _integers(names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names.split()]


class Operand(ctypes.Structure):
    """A tensor [outer, row, head, number] whose numbers lie side by side."""

    _fields_ = _integers("data dtype stride_outer stride_row stride_head")


class Paging(ctypes.Structure):
    """A block table, all zero when the cache has none."""

    _fields_ = _integers("table table_stride blocks page")


class Lengths(ctypes.Structure):
    """Who sees how much (visibility.py)."""

    _fields_ = _integers("query key key_per_row causal batch rows limit")


class Mask(ctypes.Structure):
    """A mask [request, row, position], all zero where there is none."""

    _fields_ = _integers("data dtype stride_outer stride_row stride_key")


class IndexerCall(ctypes.Structure):
    """Arguments of k31_lightning_indexer."""

    _fields_ = [
        ("query", Operand),
        ("key", Operand),
        ("weights", Operand),
        ("paging", Paging),
        ("lengths", Lengths),
        ("mask", Mask),
        *_integers("heads width count by_score fill_lowest threads result failed"),
    ]


class AttentionCall(ctypes.Structure):
    """Arguments of k31_sparse_attention."""

    _fields_ = [
        *((name, Operand) for name in ("query", "query_rope", "key", "key_rope", "value")),
        ("paging", Paging),
        ("lengths", Lengths),
        ("mask", Mask),
        *_integers("indices index_bytes index_stride_request index_stride_row count"),
        *_integers("heads groups width rope_width value_width"),
        ("scale", ctypes.c_double),
        *_integers("threads result result_dtype failed"),
    ]


class DeltaCall(ctypes.Structure):
    """Arguments of k31_delta_rule."""

    _fields_ = [
        *((name, Operand) for name in ("query", "key", "value", "gate", "beta", "state")),
        *_integers("limits sequences tokens heads width depth scalar_gate value_first by_chunk"),
        ("scale", ctypes.c_double),
        *_integers("threads output last places"),
    ]


class GatingCall(ctypes.Structure):
    """Arguments of k31_moe_gating; `bias` is float32 [experts] or null."""

    _fields_ = [
        ("x", Operand),
        *_integers("bias rows experts count groups kept_groups two_best renorm sigmoid"),
        *((name, ctypes.c_double) for name in ("group_fill", "factor", "eps")),
        *_integers("threads weights chosen"),
    ]


class Matrices(ctypes.Structure):
    """A projection of every expert; `data` is the packed tensor, or null where `table` points at each matrix."""

    _fields_ = _integers("data table stride_expert stride_output stride_input dtype")


class ExpertsCall(ctypes.Structure):
    """Arguments of k31_grouped_experts."""

    _fields_ = [
        ("x", Operand),
        ("weights", Operand),
        *_integers("indices index_bytes index_stride_row index_stride_slot"),
        *((name, Matrices) for name in ("gate", "up", "down")),
        *_integers("rows slots experts width inner result_width situ"),
        *((name, ctypes.c_double) for name in ("beta", "linear_beta")),
        *_integers("threads result"),
    ]


class SkinnyCall(ctypes.Structure):
    """Arguments of k31_skinny_linear."""

    _fields_ = [
        *((name, Operand) for name in ("x", "weight", "bias")),
        *_integers("rows outputs depth threads result"),
    ]


class ShortConvCall(ctypes.Structure):
    """Arguments of k31_short_conv."""

    _fields_ = [
        *((name, Operand) for name in ("x", "weight", "bias", "state")),
        *_integers("lengths batch tokens channels taps activation threads result new_state state_dtype"),
    ]


class GatedRmsNormCall(ctypes.Structure):
    """Arguments of k31_gated_rms_norm."""

    _fields_ = [
        *((name, Operand) for name in ("x", "gate", "weight")),
        *_integers("outer rows heads width activation gate_first weight_cast"),
        ("eps", ctypes.c_double),
        *_integers("threads result result_dtype"),
    ]


class MegaKdaCall(ctypes.Structure):
    """Arguments of k31_mega_kda; `x`, `weight` and `conv_state` are those of query, key and value."""

    _fields_ = [
        *((name, Operand * 3) for name in ("x", "weight", "conv_state")),
        *((name, Operand) for name in ("raw_gate", "a_log", "dt_bias", "raw_beta", "state", "out_gate", "norm_weight")),
        *_integers("batch tokens heads width depth taps softplus value_first beta_dtype core_dtype"),
        *_integers("activation gate_first weight_cast"),
        *((name, ctypes.c_double) for name in ("lower_bound", "l2_eps", "beta_factor", "scale", "norm_eps")),
        *_integers("threads result result_dtype new_conv conv_dtype last places"),
    ]


class AttnResPrepareCall(ctypes.Structure):
    """Arguments of k31_attn_res_prepare."""

    _fields_ = [
        ("queries", Operand),
        *_integers("blocks valid tokens block_count query_count width"),
        ("eps", ctypes.c_double),
        *_integers("threads maximum total mixture weights"),
    ]


class AttnResUpdateCall(ctypes.Structure):
    """Arguments of k31_attn_res_update."""

    _fields_ = [
        *((name, Operand) for name in ("partial", "delta", "maximum", "total", "mixture", "query", "norm_weight")),
        *_integers("blocks block_count tokens width"),
        ("eps", ctypes.c_double),
        ("norm_eps", ctypes.c_double),
        *_integers("threads sum mixed mixed_dtype"),
    ]


FUNCTIONS: dict[str, type[ctypes.Structure]] = {
    "k31_lightning_indexer": IndexerCall,
    "k31_sparse_attention": AttentionCall,
    "k31_delta_rule": DeltaCall,
    "k31_moe_gating": GatingCall,
    "k31_grouped_experts": ExpertsCall,
    "k31_short_conv": ShortConvCall,
    "k31_gated_rms_norm": GatedRmsNormCall,
    "k31_skinny_linear": SkinnyCall,
    "k31_mega_kda": MegaKdaCall,
    "k31_attn_res_prepare": AttnResPrepareCall,
    "k31_attn_res_update": AttnResUpdateCall,
}


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself when its last dimension is contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def operand(tensor: torch.Tensor | None) -> Operand:
    """Describe a readable [outer, row, head, number] tensor, or weights [outer, row, head]; None is all zero."""
    if tensor is None:
        return Operand()
    stride = tensor.stride()
    return Operand(tensor.data_ptr(), DTYPES[tensor.dtype], stride[0], stride[1], stride[2])


def plane(tensor: torch.Tensor) -> Operand:
    """Describe a tensor [row, number] of any strides; a readable one has its numbers side by side."""
    rows, numbers = tensor.stride()
    return Operand(tensor.data_ptr(), DTYPES[tensor.dtype], rows, numbers)


def row_operand(tensor: torch.Tensor | None) -> Operand:
    """Describe a readable [..., number] tensor of up to four dimensions; the leading ones it lacks have stride 0."""
    if tensor is None:
        return Operand()
    return Operand(tensor.data_ptr(), DTYPES[tensor.dtype], *(0, 0, 0, *tensor.stride()[:-1])[-3:])


def sum_operands(banks: Sequence[torch.Tensor]) -> ctypes.Array[Operand]:
    """Describe the frozen sums in readable banks [M, n, D] one by one, each as rows [M, D]."""
    sums = [row_operand(one) for bank in banks for one in bank.unbind(1)]
    return (Operand * len(sums))(*sums)


def number_operand(tensor: torch.Tensor) -> Operand:
    """Describe a [head] tensor of any stride."""
    return Operand(tensor.data_ptr(), DTYPES[tensor.dtype], 0, 0, tensor.stride(0))


def unread(**tensors: torch.Tensor | None) -> str | None:
    """Why the kernels do not read one of these tensors, by its name; None when they read them all."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{name} is {tensor.dtype}; the kernel reads float32 and bfloat16"
    return None


def integers(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Lengths and tables as the kernels read them: on the CPU, int64, contiguous."""
    return None if tensor is None else tensor.to("cpu", torch.int64).contiguous()


def places(rows: torch.Tensor | None, count: int, states: int) -> torch.Tensor | None:
    """Which of a pool's states `count` sequences have, int64 and from 0; None where each has the one of its number.

    Raises OperatorError on rows that are no list of `count` states of the pool.
    """
    if rows is None:
        return None
    listed = rows.tolist() if rows.dim() == 1 and not rows.is_floating_point() and rows.dtype != torch.bool else []
    if len(listed) != count:
        raise OperatorError(f"rows must be {count} integers, one a request, not {rows.dtype} {list(rows.shape)}")
    for row in listed:
        if not -states <= row < states:
            raise OperatorError(f"rows holds {row}, but the pool has {states} states")
    return torch.tensor([row % states for row in listed])


def is_repeated(rows: torch.Tensor | None, states: int) -> bool:
    """Whether two sequences have one state of a pool, so that none may be written while another is still to be read."""
    return rows is not None and len({row % states for row in rows.flatten().tolist()}) < rows.numel()


def paging(table: torch.Tensor | None, cache: torch.Tensor) -> Paging:
    """Describe an int64 block table over the pages of `cache`."""
    if table is None:
        return Paging()
    return Paging(table.data_ptr(), table.shape[1], cache.shape[0], cache.shape[1])


def lengths(
    query: torch.Tensor | None, key: torch.Tensor | None, mode: int, rows: tuple[int, int], limit: int
) -> Lengths:
    """Describe int64 lengths; `rows` is (batch, query rows), `limit` the positions of a request."""
    return Lengths(
        0 if query is None else query.data_ptr(),
        0 if key is None else key.data_ptr(),
        key is not None and key.dim() == 2,
        mode == CAUSAL,
        *rows,
        limit,
    )


def maskable(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A mask in a dtype that the kernels read: itself, or float32 of a wider or a half one."""
    return tensor if tensor is None or tensor.dtype in MASK_DTYPES else tensor.to(torch.float32)


def mask(tensor: torch.Tensor | None) -> Mask:
    """Describe a mask [B, T, S], any of the sizes 1, that `maskable` gave."""
    if tensor is None:
        return Mask()
    strides = (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Mask(tensor.data_ptr(), MASK_DTYPES[tensor.dtype], *strides)


def is_transposed(matrix: torch.Tensor) -> bool:
    """Whether a matrix, or a packed tensor of them, has its columns side by side in memory and not its rows."""
    return matrix.stride(-1) != 1


def pointers(matrices: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Where each matrix of a list lies, int64; None for a packed tensor, which says so by its strides."""
    return None if matrices[0].dim() == 3 else torch.tensor([matrix.data_ptr() for matrix in matrices])


def matrices(experts: Sequence[torch.Tensor], table: torch.Tensor | None) -> Matrices:
    """Describe a projection whose matrices share strides and dtype; `table` is what `pointers` gave for it."""
    first = experts[0]
    *outer, output, column = first.stride()
    where = (first.data_ptr(), 0, outer[0]) if table is None else (0, table.data_ptr(), 0)
    return Matrices(*where, output, column, DTYPES[first.dtype])
