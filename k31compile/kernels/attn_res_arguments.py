"""Arguments of the two ``k31::attn_res`` operators: names, defaults, checks, and the tensors of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from k31compile.errors import OperatorError
from k31compile.kernels.checks import FLOATS, accumulation_dtype, check_floats, check_shape
from k31compile.kernels.visibility import INTEGERS


@dataclass(slots=True, eq=False)
class Prepare:
    """All queries of a block of layers against its frozen sums (K3.1 spec 2.2, first phase).

    Args:
        bank: [M, N, D], N >= 0 frozen block sums of M tokens, any strides.
        queries: [Q, D], w_q * g of each sub-layer. Any mix of float dtypes.
        eps: added to the mean of the squares of a block sum.
        valid: bool [N], which blocks count, or one integer, how many leading ones do; all without one.
        more: banks [M, n, D] whose blocks follow those of `bank`; N counts them too.
        mix: whether the third result is the mixture, or else the weights [M, Q, N] that would mix the blocks.
    """

    bank: torch.Tensor
    queries: torch.Tensor
    _: KW_ONLY
    eps: float
    valid: torch.Tensor | None = None
    more: Sequence[torch.Tensor] | None = None
    mix: bool = True

    @property
    def banks(self) -> list[torch.Tensor]:
        """All of them, in the order in which their blocks count."""
        return [self.bank, *(self.more or ())]

    @property
    def blocks(self) -> int:
        """How many blocks there are in all banks: N."""
        return sum(bank.shape[1] for bank in self.banks)

    def check_words(self) -> None:
        """Check ranks."""
        if self.bank.dim() != 3:
            raise OperatorError(f"bank must be [M, N, D], not {list(self.bank.shape)}")
        check_banks("more", self.more)
        if self.queries.dim() != 2:
            raise OperatorError(f"queries must be [Q, D], not {list(self.queries.shape)}")

    def check(self) -> None:
        """Check dtypes, devices and sizes."""
        check_floats(("bank", self.bank), ("queries", self.queries))
        check_shape("queries", self.queries, (self.queries.shape[0], self.bank.shape[2]))
        check_bank_sizes("more", self.more, ("bank", self.bank), (self.bank.shape[0], self.bank.shape[2]))
        valid = self.valid
        if valid is None:
            return
        if valid.dtype == torch.bool:
            check_shape("valid", valid, (self.blocks,))
        elif valid.dtype not in INTEGERS or valid.numel() != 1:
            shape = list(valid.shape)
            raise OperatorError(f"valid must be bool [N] or one integer, not {valid.dtype} {shape}")

    def mask(self) -> torch.Tensor | None:
        """Which blocks count: bool [N], or None when all do."""
        valid = self.valid
        if valid is None or valid.dtype == torch.bool:
            return valid
        return torch.arange(self.blocks, device=valid.device) < valid.reshape(())

    def new_results(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Maximum [M, Q], total [M, Q] and mixture [M, Q, D] or weights [M, Q, N] in the accumulation dtype."""
        dtype = accumulation_dtype(*self.banks, self.queries)
        pairs = (self.bank.shape[0], self.queries.shape[0])
        maximum, total = (self.bank.new_empty(pairs, dtype=dtype) for _ in range(2))
        last = self.bank.shape[2] if self.mix else self.blocks
        return maximum, total, self.bank.new_empty((*pairs, last), dtype=dtype)


@dataclass(slots=True, eq=False)
class Update:
    """One sub-layer's step: the running sum joins the prepared mixture (K3.1 spec 2.2, second phase).

    Args:
        partial: [M, D], the running block sum; delta: [M, D], what the last sub-layer adds to it, or None.
        maximum, total: [M]; mixture: [M, D]: one query's slices of what attn_res_prepare gave.
        query: [D], that query.
        eps: added to the mean of the squares of the running sum.
        norm_weight: [D], of an RMS norm with `norm_eps` that follows; none without one.
        dtype: of the mixed rows; that of partial without one.
        bank: banks [M, n, D] of N blocks in all; `mixture` is then their weights [M, N], and they are mixed here.
        slot: which query is meant where maximum, total and mixture are those of all, [M, Q] and [M, Q, ..].
    """

    partial: torch.Tensor
    delta: torch.Tensor | None
    maximum: torch.Tensor
    total: torch.Tensor
    mixture: torch.Tensor
    query: torch.Tensor
    _: KW_ONLY
    eps: float
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-5
    dtype: torch.dtype | None = None
    bank: Sequence[torch.Tensor] | None = None
    slot: int | None = None

    @property
    def prepared(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Maximum [M], total [M] and mixture [M, D] or weights [M, N] of this query."""
        prepared = self.maximum, self.total, self.mixture
        if self.slot is None:
            return prepared
        maximum, total, mixture = (tensor.select(1, self.slot) for tensor in prepared)
        return maximum, total, mixture

    def check_words(self) -> None:
        """Check ranks and result dtype."""
        if self.partial.dim() != 2:
            raise OperatorError(f"partial must be [M, D], not {list(self.partial.shape)}")
        if self.dtype not in (None, *FLOATS):
            raise OperatorError(f"dtype must be floating point (16 bits and up), not {self.dtype}")
        check_banks("bank", self.bank)

    def check(self) -> None:
        """Check dtypes, devices and sizes."""
        tokens, width = self.partial.shape
        check_bank_sizes("bank", self.bank, ("partial", self.partial), (tokens, width))
        prepared = width if self.bank is None else sum(bank.shape[1] for bank in self.bank)
        queries = () if self.slot is None else (self._check_slot(self.slot),)
        expected = {
            "partial": (tokens, width),
            "delta": (tokens, width),
            "maximum": (tokens, *queries),
            "total": (tokens, *queries),
            "mixture": (tokens, *queries, prepared),
            "query": (width,),
            "norm_weight": (width,),
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is not None:
                check_floats(("partial", self.partial), (name, tensor))
                check_shape(name, tensor, shape)

    def _check_slot(self, slot: int) -> int:
        """How many queries were prepared, of which `slot` is one."""
        if self.maximum.dim() != 2:
            raise OperatorError(f"maximum must be [M, Q] with a slot, not {list(self.maximum.shape)}")
        queries = self.maximum.shape[1]
        if not 0 <= slot < queries:
            raise OperatorError(f"slot must be 0 to {queries - 1}, one of the {queries} queries, not {slot}")
        return queries

    @property
    def mixed_dtype(self) -> torch.dtype:
        """Dtype of the mixed rows."""
        return self.partial.dtype if self.dtype is None else self.dtype

    def new_results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The new running sum and the mixed rows, both [M, D]."""
        shape = self.partial.shape
        return self.partial.new_empty(shape), self.partial.new_empty(shape, dtype=self.mixed_dtype)


def check_banks(name: str, banks: Sequence[torch.Tensor] | None) -> None:
    """Demand three dimensions of each bank. Raises OperatorError."""
    for i, bank in enumerate(banks or ()):
        if bank.dim() != 3:
            raise OperatorError(f"{name}[{i}] must be [M, n, D], not {list(bank.shape)}")


def check_bank_sizes(
    name: str, banks: Sequence[torch.Tensor] | None, anchor: tuple[str, torch.Tensor], outer: tuple[int, int]
) -> None:
    """Demand banks of floats on the anchor's device, all sizes but that of blocks `outer`. Raises OperatorError."""
    for i, bank in enumerate(banks or ()):
        check_floats(anchor, (f"{name}[{i}]", bank))
        check_shape(f"{name}[{i}]", bank, (outer[0], bank.shape[1], outer[1]))
