"""Operators of ours for an NPU: schema, fake, a CPU definition, and a GE converter. Their kernels are not part of this.

`k31_npu::kda_recurrent_` steps the delta rule with its float32 state where it lies, in the rows of a cache, which
torch_npu has no operator for: its own keeps the state in bfloat16. In GE it is one node, K31KdaRecurrent, that refers
to its state, so nothing is copied. A package that brings the kernel is declared in the profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.kda import kda_recurrent_reference

GE_TYPE = "K31KdaRecurrent"

_LIBRARY = torch.library.Library("k31_npu", "DEF")
_LIBRARY.define(
    "kda_recurrent_(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor(a!) state, Tensor rows, "
    "*, float scale=1.0, str state_layout='KV') -> Tensor"
)


def _define(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, state: Tensor, rows: Tensor,
    *, scale: float = 1.0, state_layout: str = "KV",
) -> Tensor:  # fmt: skip
    """Step the states in `rows` of a cache [blocks, H, K, V] (or VK) in place; what is read comes back."""
    output, last = kda_recurrent_reference(
        query, key, value, gate, beta, state[rows], scale=scale, state_layout=state_layout
    )
    state[rows] = last.to(state.dtype)
    return output


def _fake(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, state: Tensor, rows: Tensor, **_: Any
) -> Tensor:
    dtype = accumulation_dtype(query, key, value, gate, beta, state)
    return query.new_empty((*query.shape[:3], value.shape[3]), dtype=dtype)


_LIBRARY.impl("kda_recurrent_", _define, "CPU")
_LIBRARY.impl("kda_recurrent_", _fake, "Meta")


def register_converters() -> None:
    """Tell torchair how operators of ours become GE nodes; it must be open. Once is enough, more do no harm."""
    import torchair
    from torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
    from torchair.ge import attr

    operator = torch.ops.k31_npu.kda_recurrent_.default
    if getattr(operator, "_ge_converter", None) is not None:
        return

    def convert(
        query: Any, key: Any, value: Any, gate: Any, beta: Any, state: Any, rows: Any,
        *, scale: float = 1.0, state_layout: str = "KV", meta_outputs: Any = None,
    ) -> Any:  # fmt: skip
        """An output of the name of an input refers to it: GE writes the state where it lies."""
        inputs = {"query": query, "key": key, "value": value, "gate": gate, "beta": beta, "state": state, "rows": rows}
        attributes = {"scale": attr.Float(scale), "state_layout": attr.Str(state_layout)}
        output, _ = torchair.ge.custom_op(GE_TYPE, inputs=inputs, attrs=attributes, outputs=["output", "state"])
        return output

    register_fx_node_ge_converter(operator)(convert)


@dataclass
class Place:
    """Where the states of a call lie: rows of a cache that nobody else reads before the call's result is put there.

    Attributes:
        cache: the cache, in the layout of the call's states.
        rows: integers, the row of each sequence.
        taken: set by a lowering that wrote the last states there, so that nobody else has to.
    """

    cache: Tensor
    rows: Tensor
    taken: bool = False


_place: ContextVar[Place | None] = ContextVar("place", default=None)


@contextmanager
def states_lie_in(place: Place | None) -> Iterator[None]:
    """While a call is lowered: where its states lie, if that is known."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def current_place() -> Place | None:
    """Where the states of the call that is lowered lie; None where they are a tensor of their own."""
    return _place.get()
