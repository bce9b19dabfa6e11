"""Small graphs that write what they were given: lowered, they give what eager gives, in every order that is allowed."""

import copy
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from emulated import Emulated

from k31compile.backend import captured_graph
from k31compile.targets.ascend.issue import issue_in_order
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.prepare import prepare
from k31compile.targets.ascend.profiles import profile_of

A3 = profile_of("ascend-a3")
ORDERS = 5


class Calls(nn.Module):
    """A function as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def random_order(prepared, seed):
    """The lowered graph with its tasks in a random order that their dependences allow; views go before their reader."""
    draw, tasks = random.Random(seed), prepared.tasks
    left, done, order = dict(enumerate(tasks.before)), set(), []
    while left:
        place = draw.choice([place for place, before in left.items() if done.issuperset(before)])
        del left[place]
        done.add(place)
        order.append(tasks.tasks[place].name)
    module = copy.deepcopy(prepared.lowered.module)
    issue_in_order(module, order)
    module.graph.lint()
    module.recompile()
    return module


def judge(function, *inputs):
    """Compare results and what was written with eager, as lowered, as issued, and in random orders."""
    from k31compile.targets.ascend.streams import write_streams

    open_session(A3)
    eager = [x.clone() for x in inputs]
    with torch.no_grad():
        expected = function(*eager)
        module, tensors = captured_graph(Calls(function), inputs, {}, A3.name)
        prepared = prepare(module, A3, tensors)
        modules = [prepared.lowered.module, *(random_order(prepared, seed) for seed in range(ORDERS))]
        issued = copy.deepcopy(prepared.lowered.module)
        write_streams(issued, prepared.schedule)
        before = [x.clone() for x in inputs]
        for one in [*modules, issued]:
            for x, kept in zip(inputs, before, strict=True):
                x.copy_(kept)
            got = Emulated(one).run(*tensors)
            torch.testing.assert_close(tuple(got), expected if isinstance(expected, tuple) else (expected,))
            torch.testing.assert_close(list(inputs), eager)


def normalise(wide, w):
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w.float()


def norm_of_a_cache_as_it_was(cache, _slots, rows, w):
    wide = cache.float()
    cache[:2] = rows
    return normalise(wide, w).to(cache.dtype)


def whole_turn(cache, slots, rows, _w):
    before = torch.roll(cache, cache.shape[0], 0)
    cache[slots] = rows
    return before * 2, cache * 2


def sum_before_and_after(cache, slots, rows, _w):
    before = cache.sum(-1)
    cache[slots] = rows
    return before, cache.sum(-1)


@pytest.mark.parametrize("function", [norm_of_a_cache_as_it_was, whole_turn, sum_before_and_after])
def test_what_was_read_before_a_write_is_what_was_there(function):
    draw = torch.Generator().manual_seed(0)
    cache, rows, w = (torch.randn(*sizes, generator=draw).bfloat16() for sizes in ((6, 32), (2, 32), (32,)))
    judge(function, cache, torch.tensor([4, -5]), 9 * rows, w)


def two_layers_share(cache, slots, rows, _w):
    cache[slots] = rows
    first = cache.sum(0)
    cache[slots - 1] = rows + first
    return cache.sum(0) + first


def two_layers_share_pages(cache, slots, rows, _w):
    flat = cache.view(3, 2, 32).view(6, 32)
    flat[slots] = rows
    first = cache[1] * 2
    flat.index_copy_(0, slots % 6, rows + first)
    return cache.sum(0) + first


def block_and_offset(cache, slots, rows, _w):
    pages = cache.view(3, 2, 32)
    pages[slots // 2, slots % 2] = rows
    return cache * 2


@pytest.mark.parametrize("function", [two_layers_share, two_layers_share_pages, block_and_offset])
def test_a_cache_is_written_twice_and_by_block_and_offset(function):
    draw = torch.Generator().manual_seed(0)
    cache, rows, w = (torch.randn(*sizes, generator=draw).bfloat16() for sizes in ((6, 32), (2, 32), (32,)))
    judge(function, cache, torch.tensor([4, -5]), 9 * rows, w)


def test_places_of_several_dimensions_count_from_the_end_too():
    def write(cache, blocks, offsets, rows):
        cache[blocks, offsets] = rows
        return cache.sum(0)

    places = torch.tensor([[2], [-4]]), torch.tensor([0, -1, 3], dtype=torch.int32).long()
    judge(write, torch.randn(4, 5, 3, 2), *places, torch.randn(2, 3, 3, 2))


def write_transposed(cache, slots, rows):
    cache.transpose(0, 1)[slots] = rows
    return cache + 1


@pytest.mark.parametrize("blocks", [4, 3])
def test_a_write_through_a_transposed_cache_lands_where_eager_puts_it(blocks):
    # Where both dimensions are 4 the transposed view has the shape of the cache.
    judge(write_transposed, torch.randn(blocks, 4, 8), torch.tensor([1, 2]), torch.randn(2, blocks, 8))


def by_mask(cache, mask, row):
    cache[mask] = row
    first = cache.sum(0)
    cache[~mask] = 1.0
    return cache + 1, first


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("rows", [(), (1,), (2,)])
def test_a_mask_names_rows_and_bytes_are_a_mask(rows, dtype):
    if dtype == torch.uint8:

        def function(cache, mask, row):
            cache[mask] = row
            return cache + 1

    else:
        function = by_mask
    judge(function, torch.randn(4, 8), torch.tensor([1, 0, 1, 0]).to(dtype), torch.randn(*rows, 8))


def sums(cache, places, rows):
    cache.index_put_((places,), rows, accumulate=True)
    first = cache.sum()
    cache[1].index_add_(0, places % 4, rows[:, 0])
    return first, cache * 2


def apart(cache, places, rows):
    cache[places, :, places + 1] = rows[:, :, 0]
    return cache.sum(0)


def on_the_diagonal(cache, places, rows):
    cache.diagonal(0, 1, 2).copy_(rows[0, :3, :4].sum(0))
    cache.index_fill_(2, places, 7.0)
    return cache.sum(0)


@pytest.mark.parametrize("function", [sums, apart, on_the_diagonal])
def test_a_write_that_is_no_list_of_rows_lands_where_eager_puts_it(function):
    places = torch.tensor([2, -4, 2]) if function is sums else torch.tensor([2, 0, 1])
    judge(function, torch.randn(4, 4, 6), places, torch.randn(3, 4, 6))


@pytest.mark.parametrize("descending", [False, True])
def test_bytes_are_sorted_as_numbers_without_a_sign(descending):
    def function(x):
        values, order = torch.sort(x, stable=True, descending=descending)
        return values, order

    judge(function, torch.tensor([3, 1, 0, 255, 1, 128], dtype=torch.uint8))
