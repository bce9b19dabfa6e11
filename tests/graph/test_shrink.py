"""Large sizes become small ones where each number has one meaning, and stay beyond every constant."""

import pytest
import torch
from captured import sketch

from k31compile.graph.constants import largest_constant
from k31compile.graph.shrink import SMALL_COUNT, SMALL_KEYS, SMALL_ROWS, shrunk_pool, shrunk_sizes

LENGTHS = {"b": 2, "t": 509, "s": 4016, "k": 1021}


def test_rows_keys_and_count_become_small():
    small = shrunk_sizes(LENGTHS, (3, 7))
    assert (small[509], small[4016], small[1021]) == (SMALL_ROWS, SMALL_KEYS, SMALL_COUNT)


def test_small_regions_are_left_as_they_are():
    assert shrunk_sizes({"b": 2, "t": 5, "s": 40, "k": 4}, (3, 7)) == {}


def test_a_decode_row_stays_one_row():
    small = shrunk_sizes({**LENGTHS, "t": 1}, (3, 7))
    assert 1 not in small
    assert small[4016] == SMALL_KEYS


def test_products_differences_and_neighbours_follow():
    small = shrunk_sizes(LENGTHS, (3, 7))
    assert small[4016 * 7] == SMALL_KEYS * 7
    assert small[2 * 509 * 3] == 2 * SMALL_ROWS * 3
    assert small[509 * 4016] == SMALL_ROWS * SMALL_KEYS
    assert small[4016 - 509] == SMALL_KEYS - SMALL_ROWS
    assert small[4016 + 1] == SMALL_KEYS + 1
    assert small[509 - 1] == SMALL_ROWS - 1


def test_where_keys_are_as_many_as_a_width_nothing_is_shrunk():
    assert shrunk_sizes(LENGTHS, (3, LENGTHS["s"])) == {}


def test_rows_or_choices_that_are_as_many_as_a_width_stay():
    small = shrunk_sizes(LENGTHS, (3, LENGTHS["t"]))
    assert LENGTHS["t"] not in small
    assert small[LENGTHS["s"]] == SMALL_KEYS
    small = shrunk_sizes(LENGTHS, (3, LENGTHS["k"]))
    assert LENGTHS["k"] not in small
    assert small[LENGTHS["s"]] > 2 * LENGTHS["k"]
    assert small[LENGTHS["t"]] == SMALL_ROWS


def test_a_product_that_is_also_a_length_is_taken_for_the_length():
    # 512 rows of 8 heads are as many as the keys; where the product stands in a shape, the run fails.
    assert shrunk_sizes({**LENGTHS, "t": 512, "s": 4096}, (8,))[4096] == SMALL_KEYS


def test_equal_rows_and_keys_shrink_to_one_size():
    small = shrunk_sizes({**LENGTHS, "t": 4016}, (3, 7))
    assert small[4016] == SMALL_KEYS


@pytest.mark.parametrize("window", [64, 100, 1000])
def test_a_window_forces_sizes_beyond_it(window):
    small = shrunk_sizes(LENGTHS, (3, 7), beyond=window)
    assert small[4016] > 2 * window
    assert small.get(509, 509) >= min(509, 2 * window + 1)


def test_a_list_of_which_a_part_is_used_stays_longer_than_the_part():
    small = shrunk_sizes(LENGTHS, (3, 7), beyond=13)
    assert small[1021] == 14


def test_a_number_that_is_two_lengths_is_as_large_as_either_needs():
    """A full sort of 43 keys of which 13 are used: with 11 of each, using 13 looked like using all."""
    assert shrunk_sizes({"b": 2, "t": 1, "s": 43, "k": 43}, (3, 7), beyond=13) == {}
    assert shrunk_sizes({**LENGTHS, "k": 4016}, (3, 7))[4016] == SMALL_KEYS
    assert shrunk_sizes({**LENGTHS, "t": 1021}, (3, 7), beyond=40)[1021] == 81


def test_a_window_as_long_as_half_the_keys_shrinks_nothing():
    assert shrunk_sizes(LENGTHS, (3, 7), beyond=2048) == {}


def test_keys_in_pages_are_whole_pages():
    small = shrunk_sizes(LENGTHS, (3, 7), page=16)
    assert small[4016] == 48
    assert small[4016 // 16] == 3


def test_a_pool_holds_all_requests_and_a_null_block():
    small = shrunk_sizes(LENGTHS, (3, 7), page=16)
    pool = shrunk_pool((1000, 16, 7), 2, small, 4016)
    assert pool == {1000: 7, 16000: 112, 112000: 784}


def test_a_pool_that_is_small_already_is_left():
    small = shrunk_sizes(LENGTHS, (3, 7), page=16)
    assert shrunk_pool((7, 16, 7), 2, small, 4016) == {}


def constant(program, *args, lengths=()):
    return largest_constant(sketch(program, *args).nodes, lengths)


X = torch.randn(5, 7)
ROW = torch.arange(7)

CONSTANTS = {
    "a window": (lambda x: x.masked_fill(torch.arange(5)[:, None] - 64 > ROW, 0), 64),
    "a bound": (lambda x: x.masked_fill(ROW >= 33, 0), 33),
    "a float bound": (lambda x: x * (x.sum() < 40.5), 41),
    "the larger of two": (lambda x: x.masked_fill((ROW > 12) | (ROW + 90 < 3), 0), 90),
    "a stride": (lambda x: x * (ROW // 48 * 1), 48),
    "a small tensor": (lambda x: x + torch.tensor([17, 3, 1, 1, 1, 1, 1]), 17),
    "no factor": (lambda x: x * 0.5 + 100.5, 0),
    "no filling": (lambda x: x.masked_fill(x > 0, -1e9), 0),
    "no shape": (lambda x: x.reshape(35, 1).expand(35, 60).sum(1).view(5, 7), 0),
    "no infinity": (lambda x: x * (x > -float("inf")), 0),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_the_largest_constant(name):
    program, expected = CONSTANTS[name]
    assert constant(program, X) == expected


def test_lengths_and_their_differences_are_no_constants():
    def program(x):
        row = torch.arange(7)
        return x * (row + 30 > 29) * (row - 12) * (row < 18)

    assert constant(program, X) == 30
    assert constant(program, X, lengths=(30, 12, 7)) == 0


def test_of_several_meanings_the_one_of_the_fewest_factors_counts():
    # 2048 x 128 selected keys; 32 pages x 32 pages x width 256 is the same number
    small = shrunk_sizes({"b": 1, "t": 2048, "s": 2048, "k": 128}, (8, 256, 64), page=64)
    assert small[2048 * 128] == small[2048] * small[128]


@pytest.mark.parametrize("length", [512, 2048, 8192, 16384])
@pytest.mark.parametrize("count", [64, 128, 512, 2048])
@pytest.mark.parametrize("others", [(8, 256, 64), (16, 512, 32), (64, 576, 48)], ids=str)
def test_rows_of_selected_keys_have_one_meaning(length, count, others):
    small = shrunk_sizes({"b": 1, "t": length, "s": length, "k": count}, others, page=64 if count != 64 else 0)
    if not small:
        assert length in others  # keys that are as many as a width are not shrunk
        return
    assert small.get(length * count, 0) == small[length] * small.get(count, count)
