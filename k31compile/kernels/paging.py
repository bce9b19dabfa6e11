"""Reading a cache that is one tensor per request or pages behind a block table (K3.1 spec 2.13)."""

from __future__ import annotations

import torch

from k31compile.errors import OperatorError
from k31compile.kernels.visibility import check_integers

CONTIGUOUS = "BSND"
PAGED = "PA_BSND"


def check_cache(
    name: str,
    cache: torch.Tensor,
    batch: int,
    block_table: torch.Tensor | None,
    layout: str,
    layout_name: str,
) -> None:
    """Check rank, layout word and block table of a cache [B,S,N,D] or pages [blocks,page,N,D]."""
    if layout not in (CONTIGUOUS, PAGED):
        raise OperatorError(f"{layout_name} must be 'BSND' or 'PA_BSND', not {layout!r}")
    if cache.dim() != 4:
        raise OperatorError(f"{name} must have 4 dimensions, not {cache.dim()}")
    if layout == CONTIGUOUS:
        if block_table is not None:
            raise OperatorError(f"block_table belongs to {layout_name}='PA_BSND', this call says 'BSND'")
        if cache.shape[0] != batch:
            raise OperatorError(f"{name} holds {cache.shape[0]} requests, the query {batch}")
        return
    if block_table is None:
        raise OperatorError(f"{layout_name}='PA_BSND' needs a block_table")
    check_integers("block_table", block_table)
    if block_table.device != cache.device:
        raise OperatorError(f"block_table is on {block_table.device}, {name} on {cache.device}")
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise OperatorError(f"block_table must have shape [{batch}, max_blocks], not {list(block_table.shape)}")


def positions(cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """How many positions a request can have: S, or max_blocks * page."""
    return int(cache.shape[1]) if block_table is None else int(block_table.shape[1] * cache.shape[1])


def slots(
    cache: torch.Tensor,
    block_table: torch.Tensor | None,
    request: int,
    index: torch.Tensor,
    used: torch.Tensor,
) -> torch.Tensor:
    """Rows of `cache` at `index` of one request: [..., N, D]; slots where `used` is False are read as zeros.

    Raises OperatorError when a used position falls into a block that does not exist.
    """
    if cache.shape[0] * cache.shape[1] == 0:  # nothing to read, and no position 0 to stand in for it
        return cache.new_zeros((*index.shape, *cache.shape[2:]))
    index = torch.where(used, index, 0)
    if block_table is None:
        rows = cache[request][index]
    else:
        page = cache.shape[1]
        block = block_table[request].to(torch.int64)[index // page]
        outside = used & ((block < 0) | (block >= cache.shape[0]))
        if bool(outside.any()):
            raise OperatorError("block_table names a block that does not exist", where=f"request {request}")
        rows = cache[torch.where(used, block, 0), index % page]
    return torch.where(used[..., None, None], rows, 0)
