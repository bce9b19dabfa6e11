"""Confirm a large region at small sizes: the numbers in its arguments that are a length become a smaller length.

A region of T = 4096 rows computes what the same nodes compute for 19 rows, if every 4096 in it means T. A length that
is a width as well (T equals the head size) stays as it is.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

SMALL_ROWS, SMALL_KEYS, SMALL_COUNT = 19, 41, 11
_LARGE = 48


def shrunk_sizes(lengths: Mapping[str, int], others: Sequence[int], page: int = 0, beyond: int = 0) -> dict[int, int]:
    """A map from sizes to smaller ones; empty where that is not worth while or the number of keys is a width as well.

    `lengths` holds b, t, s and k; `others` are the sizes of the operands' other dimensions; `page` is the number of
    positions in a page, of which the keys are then a multiple; there are twice as many keys as the constant `beyond`,
    and more chosen ones than that: the constant may be a window, or the part of a longer list that is used.
    """
    t, s, k = (lengths[letter] for letter in "tsk")
    if s <= _LARGE:
        return {}
    # Where k stays as it is, there must be so many keys that it is a choice.
    keys = max(SMALL_KEYS, 2 * beyond + 3, 2 * k + 3 if k in others else 0)
    keys = keys if not page else page * -(-keys // page)
    rows = max(SMALL_ROWS, min(keys, 2 * beyond + 1))
    small: dict[int, int] = {}
    for size, smallest in ((s, keys), (k, max(SMALL_COUNT, beyond + 1)), (t, rows)):
        if size in others and size != s:
            continue  # a width as well: it stays
        # A number that is two lengths at once stays as large as either needs.
        small[size] = max(small.get(size, 0), min(smallest, size))
    small = {size: less for size, less in small.items() if less < size}
    if s not in small or s in others:
        return {}
    if page and s // page not in (page, k, t, *others):
        small[s // page] = small[s] // page
    return _with_derived(small, lengths, others)


def _with_derived(small: Mapping[int, int], lengths: Mapping[str, int], others: Sequence[int]) -> dict[int, int]:
    """The sizes and what reshapes and masks make of them: products with other dimensions, differences, neighbours.

    Of several meanings of a number the one of the fewest factors is taken: 262144 is 2048 rows of 128 selected keys
    rather than 32 pages squared of width 256, and a length is a length. A wrong guess does not fit its neighbours'
    shapes; then the run fails, and the real sizes are tried.
    """
    b, t, s, k = (lengths[letter] for letter in "btsk")

    def reduced(size: int) -> int:
        return small.get(size, size)

    # How far-fetched, the number, the smaller one.
    meanings = [(1, s - t + shift, reduced(s) - reduced(t) + shift) for shift in (-1, 0, 1)]
    meanings += [(1, size + shift, reduced(size) + shift) for size in small for shift in (-1, 1)]
    factors = [b, *others]
    groups = [[size] for size in small] + [[x, y] for x, y in ((t, s), (t, k), (s, k), (t, t), (s, s), (k, k))]
    for group, count in itertools.product(groups, range(4)):
        for chosen in itertools.combinations(factors, count):
            sizes = [*group, *chosen]
            # Two lengths, as of a list of selected keys, before a length and a width.
            meanings.append((len(sizes) + len(chosen), math.prod(sizes), math.prod(map(reduced, sizes))))
    derived, ambiguous, rank = dict(small), set[int](), dict.fromkeys(small, 0)
    for far, full, less in sorted(meanings):
        if full <= _LARGE or full in others or far > rank.setdefault(full, far):
            continue
        if derived.setdefault(full, less) != less:
            ambiguous.add(full)
    # A number with two meanings stays as it is: the run then fails, and the real sizes are tried.
    return {full: less for full, less in derived.items() if full not in ambiguous}


def shrunk_pool(shape: Sequence[int], batch: int, small: Mapping[int, int], keys: int) -> dict[int, int]:
    """The sizes of a pool [blocks, page, ...] that holds the shrunk keys of all requests and a null block."""
    blocks, page, width = shape[0], shape[1], shape[-1]
    fewer = batch * (small[keys] // page) + 1
    if fewer >= blocks:
        return {}
    return {blocks: fewer, blocks * page: fewer * page, blocks * page * width: fewer * page * width}
