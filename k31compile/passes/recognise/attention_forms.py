"""The forms in which sparse attention is written, each as the operator that it becomes (K3.1 spec 2.7, 2.9, 3.2).

A form gives its leaves as operands and rewrites itself to the absorbed or plain call of `sparse_flash_attention`;
the same few lines serve the confirmation, in float64, and the graph.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k31compile.graph.layout import distinct_layouts
from k31compile.graph.sizes import numel_of, shape_of
from k31compile.passes.recognise.operands import Dense, Paged, Values, is_pool

Operand = Dense | Paged
Letters = Mapping[str, int]
Table = tuple[fx.Node, fx.Node | None]


@dataclass(frozen=True)
class Cache:
    """Keys or values as the operator takes them: a tensor [B, S, N, D], or pages and the table they stand behind."""

    operand: Operand

    def tensor(self, values: Values) -> torch.Tensor:
        """[B, S, N, D], or pages [blocks, page, 1, D]."""
        if isinstance(self.operand, Paged):
            return self.operand.cache(values)
        tensor = self.operand.canonical(values)
        return tensor if "h" in self.operand.layout.letters else tensor.unsqueeze(2)

    def block_table(self, values: Values) -> torch.Tensor | None:
        """[B, n], or None for a tensor."""
        return self.operand.block_table(values) if isinstance(self.operand, Paged) else None


@dataclass(frozen=True)
class Form:
    """Queries in one or two parts, a cache in one to three, and weights to be absorbed, if any.

    `rope_first` tells in which order a single query holds its two parts, `value_first` in which order a single
    projection holds those of keys and values, of which the latter are `width` wide; `joint` is the width of the latent
    in a cache that holds the rope part too, before it if `rope_first`.
    """

    queries: tuple[Dense, ...]
    key: Cache
    value: Cache
    rope: Cache | None = None
    weights: tuple[fx.Node, ...] = ()
    rope_first: bool = False
    value_first: bool = False
    width: int = 0
    joint: int = 0

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The distinct caches."""
        return tuple(dict.fromkeys(c for c in (self.key, self.value, self.rope) if c is not None))

    def attend(self, values: Values, indices: torch.Tensor, scale: float, **lengths: Any) -> torch.Tensor:
        """[B, T, H, Dv] by the operator; `indices` [B, T, 1, K]."""
        query, query_rope = self._split_queries(values)
        key, value = self.key.tensor(values), self.value.tensor(values)
        rope = self.rope.tensor(values) if self.rope is not None else None
        if self.joint:
            key, rope = self._split_joint(key)
            value = key
        table = self.key.block_table(values)
        key_weight, value_weight = self._split_weights(values, query)
        if key_weight is not None:
            query = torch.einsum("bthn,hnl->bthl", query, key_weight.to(query.dtype))
        latent = key_weight is not None or self.key == self.value
        result = torch.ops.k31.sparse_flash_attention(
            query,
            key,
            key if latent else value,
            indices,
            scale,
            query_rope=query_rope,
            key_rope=rope,
            block_table=table,
            layout_kv="BSND" if table is None else "PA_BSND",
            attention_mode=2 if latent else 0,
            **lengths,
        )
        if value_weight is not None:
            result = torch.einsum("bthl,hvl->bthv", result, value_weight.to(result.dtype))
        assert isinstance(result, torch.Tensor)
        return result

    def _split_joint(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rope_first:
            return cache[..., -self.joint :], cache[..., : -self.joint]
        return cache[..., : self.joint], cache[..., self.joint :]

    def _split_queries(self, values: Values) -> tuple[torch.Tensor, torch.Tensor | None]:
        if len(self.queries) == 2:
            return self.queries[0].canonical(values), self.queries[1].canonical(values)
        query = self.queries[0].canonical(values)
        rope = self._rope_width()
        if rope == 0:
            return query, None
        if self.rope_first:
            return query[..., rope:], query[..., :rope]
        return query[..., :-rope], query[..., -rope:]

    def _rope_width(self) -> int:
        if self.joint:
            return self.key.operand.size("d") - self.joint
        return self.rope.operand.size("d") if self.rope is not None else 0

    def _split_weights(self, values: Values, query: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Key weight [H, nope, L] and value weight [H, v, L]."""
        if not self.weights:
            return None, None
        heads, nope, latent = query.shape[2], query.shape[3], self.joint or self.key.operand.size("d")
        if len(self.weights) == 2:
            key, value = (values[weight] for weight in self.weights)
            return _per_head(key, heads, nope, latent), _per_head(value, heads, self.width, latent)
        both = _per_head(values[self.weights[0]], heads, nope + self.width, latent)
        if self.value_first:
            return both[:, self.width :], both[:, : self.width]
        return both[:, :nope], both[:, nope:]


def _per_head(weight: torch.Tensor, heads: int, rows: int, latent: int) -> torch.Tensor:
    """[H, rows, L] from any of [H * rows, L], [L, H * rows], [H, rows, L], [H, L, rows]."""
    if weight.dim() == 2:
        return (weight if weight.shape[1] == latent else weight.T).reshape(heads, rows, latent)
    return weight if weight.shape[2] == latent else weight.transpose(1, 2)


def forms(
    floats: Sequence[fx.Node], weights: Sequence[fx.Node], table: Table | None, letters: Letters
) -> Iterator[Form]:
    """Every form that the shapes of these leaves allow; `letters` holds b, t and `out`, the output's elements."""
    for count in (1, 2):
        for chosen in itertools.permutations(floats, count):
            rest = [leaf for leaf in floats if leaf not in chosen]
            if not 1 <= len(rest) <= 3:
                continue
            for queries in _queries(chosen, letters):
                heads = queries[0].size("h")
                width, odd = divmod(letters["out"], letters["b"] * letters["t"] * heads)
                if odd == 0:
                    yield from _with_caches(queries, rest, weights, table, {**letters, "h": heads, "v": width})


def _queries(chosen: Sequence[fx.Node], letters: Letters) -> Iterator[tuple[Dense, ...]]:
    known = {x: letters[x] for x in "bt"}
    for first in distinct_layouts(shape_of(chosen[0]), "bthd", known):
        query = Dense(chosen[0], first)
        if len(chosen) == 1:
            yield (query,)
            continue
        for second in distinct_layouts(shape_of(chosen[1]), "bthd", {**known, "h": query.size("h")}):
            yield query, Dense(chosen[1], second)


def _with_caches(
    queries: tuple[Dense, ...],
    rest: Sequence[fx.Node],
    weights: Sequence[fx.Node],
    table: Table | None,
    letters: Letters,
) -> Iterator[Form]:
    widths = [query.size("d") for query in queries]
    for order in itertools.permutations(rest):
        for caches in itertools.product(*(_caches(leaf, table, letters) for leaf in order)):
            if len({_keys(cache) for cache in caches}) != 1:
                continue
            yield from _absorbed(queries, widths, caches, letters) if not weights else ()
            if weights:
                yield from _native(queries, widths, caches, weights, letters)
            else:
                yield from _plain(queries, widths, caches, letters)


def _caches(leaf: fx.Node, table: Table | None, letters: Letters) -> list[Cache]:
    if table is not None:
        paged = Paged(leaf, *table)
        fits = is_pool(leaf) and paged.size("b") == letters["b"] and letters.get("s") in (None, paged.size("s"))
        return [Cache(paged)] if fits else []
    known = {letter: letters[letter] for letter in "bs" if letter in letters}
    found = [Cache(Dense(leaf, layout)) for layout in distinct_layouts(shape_of(leaf), "bsd", known)]
    by_head = {**known, "h": letters["h"]}
    if letters["h"] > 1:
        found += [Cache(Dense(leaf, layout)) for layout in distinct_layouts(shape_of(leaf), "bshd", by_head)]
    return found


def _keys(cache: Cache) -> tuple[int, bool]:
    dense = cache.operand
    return dense.size("s"), isinstance(dense, Dense) and "h" in dense.layout.letters


def _absorbed(
    queries: tuple[Dense, ...], widths: Sequence[int], caches: Sequence[Cache], letters: Letters
) -> Iterator[Form]:
    """Queries already in the latent space: the latent is key and value at once."""
    latent, v = caches[0].operand.size("d"), letters["v"]
    if _keys(caches[0])[1]:
        return
    if len(caches) == 1 and len(queries) == 1:
        if latent == v == widths[0]:
            yield Form(queries, caches[0], caches[0])
        elif widths[0] == latent > v:
            yield from _joint(queries, caches[0], v)
    elif len(caches) == 1 and sum(widths) == latent > v == widths[0]:
        yield from _joint(queries, caches[0], v)
    elif len(caches) == 2 and latent == v:
        rope = caches[1].operand.size("d")
        if list(widths) == [latent, rope]:
            yield Form(queries, caches[0], caches[0], caches[1])
        elif list(widths) == [latent + rope]:
            yield Form(queries, caches[0], caches[0], caches[1])
            yield Form(queries, caches[0], caches[0], caches[1], rope_first=True)


def _joint(queries: tuple[Dense, ...], cache: Cache, width: int) -> Iterator[Form]:
    """One cache of both parts, the values before or behind the rope part."""
    for rope_first in (False, True):
        yield Form(queries, cache, cache, joint=width, rope_first=rope_first)


def _plain(
    queries: tuple[Dense, ...], widths: Sequence[int], caches: Sequence[Cache], letters: Letters
) -> Iterator[Form]:
    """Keys and values apart, for all heads together or for each."""
    if len(queries) != 1 or len(caches) < 2 or caches[1].operand.size("d") != letters["v"]:
        return
    key = caches[0].operand.size("d")
    if len(caches) == 2 and widths[0] == key:
        yield Form(queries, caches[0], caches[1])
    elif len(caches) == 3 and widths[0] == key + caches[2].operand.size("d"):
        yield Form(queries, caches[0], caches[1], caches[2])
        yield Form(queries, caches[0], caches[1], caches[2], rope_first=True)


def _native(
    queries: tuple[Dense, ...],
    widths: Sequence[int],
    caches: Sequence[Cache],
    weights: Sequence[fx.Node],
    letters: Letters,
) -> Iterator[Form]:
    """Keys and values projected from the latent, to be absorbed into the query and the output."""
    if max(len(caches), len(weights)) > 2 or _keys(caches[0])[1]:
        return
    stored = caches[0].operand.size("d")
    if len(caches) == 2:
        parts = [(stored, caches[1].operand.size("d"), 0)]
    else:
        parts = [(stored, 0, 0), *((latent, stored - latent, latent) for latent in range(1, stored))]
    for latent, rope, joint in parts:
        nope = widths[0] if len(queries) == 2 else widths[0] - rope
        if nope <= 0 or (len(queries) == 2 and widths[1] != rope):
            continue
        for order in _orders(weights, letters["h"] * latent, nope, letters["v"]):
            for rope_first in (False, True) if rope and (len(queries) == 1 or joint) else (False,):
                for value_first in (False, True) if len(order) == 1 else (False,):
                    yield Form(
                        queries,
                        caches[0],
                        caches[0],
                        caches[1] if len(caches) == 2 else None,
                        order,
                        rope_first=rope_first,
                        value_first=value_first,
                        width=letters["v"],
                        joint=joint,
                    )


def _orders(weights: Sequence[fx.Node], rows: int, nope: int, width: int) -> Iterator[tuple[fx.Node, ...]]:
    """The weights that make `nope` and `width` columns of each of `rows`, for keys first, or one for both."""
    expected = [rows * (nope + width)] if len(weights) == 1 else [rows * nope, rows * width]
    for order in itertools.permutations(weights):
        if [numel_of(weight) for weight in order] == expected:
            yield order
