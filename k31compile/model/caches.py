"""Caches of a running batch: paged keys, recurrent states, and where this call writes (K3.1 spec 2.13)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from k31compile.model.config import K31Config
from k31compile.model.errors import CapacityError, ConfigError
from k31compile.model.norms import accumulate_dtype


class KdaCache(NamedTuple):
    """States of one KDA layer, a row per request; row 0 is the null row.

    conv [1+B, W-1, C] in the stream dtype; state [1+B, H, V, K] in float32 (float64 for a float64 model).
    """

    conv: Tensor
    state: Tensor


class MlaCache(NamedTuple):
    """Pages of one MLA layer; block 0 is the null block.

    latent [blocks, page, 1, kv_lora], rope [blocks, page, 1, rope_dim],
    index_keys [blocks, page, 1, index_head_dim] or None where the layer shares the selection of another.
    """

    latent: Tensor
    rope: Tensor
    index_keys: Tensor | None


class Step(NamedTuple):
    """What every layer must know of one call, made once from (start, lengths) by `make_step`.

    positions int64 [B, T], slots int64 [B, T] (rows of the flattened pages to write), visible bool [B, T, S],
    block_table int32 [B, blocks], state_rows int64 [B]; lengths [B] and valid bool [B, T], or None where
    nothing is padding.
    """

    positions: Tensor
    slots: Tensor
    visible: Tensor
    block_table: Tensor
    state_rows: Tensor
    lengths: Tensor | None
    valid: Tensor | None


@dataclass(frozen=True)
class Caches:
    """All caches of a batch. Every update is in place, so a compiled graph may keep the addresses.

    block_table int32 [B, blocks per request]: the pages of each request, 0 where it has none.
    state_rows int64 [B]: the row of each request in the state pools, 0 for an inactive one.
    page_size is the number of tokens of a page; one KdaCache or MlaCache per layer.
    """

    block_table: Tensor
    state_rows: Tensor
    layers: tuple[KdaCache | MlaCache, ...]
    page_size: int

    @classmethod
    def allocate(
        cls,
        config: K31Config,
        batch_size: int,
        max_tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "Caches":
        """Zeroed caches for `batch_size` requests of up to `max_tokens` tokens, rounded up to whole pages."""
        if batch_size < 1 or max_tokens < 1:
            raise ConfigError(f"Caches.allocate({batch_size=}, {max_tokens=}): both must be above 0")
        per_request = -(-max_tokens // config.page_size)
        blocks = torch.arange(1, 1 + batch_size * per_request, dtype=torch.int32, device=device)
        layers = tuple(
            _mla_cache(config, layer, int(blocks.shape[0]) + 1, dtype, device)
            if config.is_mla(layer)
            else _kda_cache(config, batch_size + 1, dtype, device)
            for layer in range(config.num_hidden_layers)
        )
        rows = torch.arange(1, 1 + batch_size, device=device)
        return cls(blocks.view(batch_size, per_request), rows, layers, config.page_size)

    @property
    def batch_size(self) -> int:
        """Number of requests, B."""
        return self.block_table.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that fit for each request, S: a constant of every graph."""
        return self.block_table.shape[1] * self.page_size

    def reset(self, request: int | None = None) -> None:
        """Zero in place the states of one request, or everything for None; it may then begin at start 0.

        Pages of a single request are left as they are: nothing beyond a request's length is ever read.
        """
        for cache in self.layers:
            if request is None:
                for tensor in cache:
                    if tensor is not None:
                        tensor.zero_()
            elif isinstance(cache, KdaCache):
                row = self.state_rows[request]
                cache.conv[row] = 0
                cache.state[row] = 0

    def check_room(self, last: int) -> None:
        """Raise CapacityError unless a request of `last` tokens fits."""
        if last > self.capacity:
            raise CapacityError(
                f"caches have room for {self.capacity} tokens per request, {last} are needed: "
                f"allocate with max_tokens={last}"
            )


# Lets torch.export and every other walker over arguments see the tensors inside.
torch.export.register_dataclass(Caches)


def _kda_cache(config: K31Config, rows: int, dtype: torch.dtype, device: torch.device | str | None) -> KdaCache:
    state = (rows, config.kda_num_heads, config.kda_value_dim, config.kda_key_dim)
    return KdaCache(
        torch.zeros(rows, config.short_conv_kernel_size - 1, config.conv_channels, dtype=dtype, device=device),
        torch.zeros(state, dtype=accumulate_dtype(dtype), device=device),
    )


def _mla_cache(
    config: K31Config, layer: int, blocks: int, dtype: torch.dtype, device: torch.device | str | None
) -> MlaCache:
    def pages(width: int) -> Tensor:
        return torch.zeros(blocks, config.page_size, 1, width, dtype=dtype, device=device)

    index_keys = pages(config.index_head_dim) if config.has_indexer(layer) else None
    return MlaCache(pages(config.kv_lora_rank), pages(config.qk_rope_head_dim), index_keys)


def page_slots(block_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Rows of the flattened pages that hold `positions`: block * page + position % page (K3.1 spec 2.13).

    block_table [B, blocks], positions int64 [B, ...] below the capacity -> int64 of the same shape.
    """
    blocks = block_table.long().gather(1, (positions // page_size).flatten(1)).view_as(positions)
    return blocks * page_size + positions % page_size


def make_step(caches: Caches, length: int, start: Tensor, lengths: Tensor | None) -> Step:
    """Positions, write slots and visible keys of a call of `length` tokens that begins at `start` [B].

    Padding sees no key at all and writes to slot 0, in the null block.
    """
    device = caches.block_table.device
    offsets = torch.arange(length, device=device)
    positions = start.long()[:, None] + offsets
    visible = torch.arange(caches.capacity, device=device) <= positions[..., None]
    if lengths is None:
        slots = page_slots(caches.block_table, positions, caches.page_size)
        return Step(positions, slots, visible, caches.block_table, caches.state_rows, None, None)
    valid = offsets < lengths[:, None]
    slots = page_slots(caches.block_table, torch.where(valid, positions, 0), caches.page_size)
    return Step(
        positions,
        torch.where(valid, slots, 0),
        visible & valid[..., None],
        caches.block_table,
        caches.state_rows,
        lengths,
        valid,
    )


def write_pages(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store rows [B, T, d] at slots [B, T] of pages [blocks, page, 1, d], in place."""
    pages.view(-1, pages.shape[-1])[slots] = rows.to(pages.dtype)


def read_pages(pages: Tensor, block_table: Tensor) -> Tensor:
    """Every slot of each request in order of position: [blocks, page, 1, d] -> [B, S, d]."""
    return pages[block_table.long()].flatten(1, 3)


def gather_pages(pages: Tensor, slots: Tensor) -> Tensor:
    """The rows at slots [B, T, k] of pages [blocks, page, 1, d] -> [B, T, k, d]."""
    return pages.view(-1, pages.shape[-1])[slots]
