"""A state is written where it lies where the graph allows it, and nowhere else."""

import pytest
import torch
from captured import capture, operators

from k31compile.targets.state_writes import update_states_in_place

ROWS = torch.tensor([3, 1])
BATCH, HEADS, WIDTH, DEPTH = 2, 3, 5, 7
step = torch.ops.k31.kda_recurrent


def operands(depth=DEPTH):
    torch.manual_seed(0)
    query, key = torch.randn(2, BATCH, 1, HEADS, WIDTH).unbind()
    value, gate = torch.randn(BATCH, 1, HEADS, depth), -torch.rand(BATCH, 1, HEADS, WIDTH)
    return query, key, value, gate, torch.rand(BATCH, 1, HEADS)


def whole(state, *x):
    output, new = step(*x, state, scale=0.5)
    state.copy_(new)
    return output * 2


def rows_of_a_pool(pool, *x):
    output, new = step(*x, pool[ROWS])
    pool[ROWS] = new
    return output * 2


def rows_through_views(pool, *x):
    output, new = step(*x, pool[ROWS].contiguous().view(BATCH, HEADS, WIDTH, DEPTH))
    pool[ROWS] = new.transpose(2, 3).contiguous().transpose(2, 3)
    return output * 2


def value_first(pool, *x):
    output, new = step(*x, pool[ROWS], state_layout="VK")
    pool[ROWS] = new
    return output * 2


def read_before(pool, *x):
    total = pool.sum()
    output, new = step(*x, pool[ROWS])
    pool[ROWS] = new
    return output * total


def packed(state, *x):
    raw_gate, raw_beta = x[3], x[4]
    channels = torch.cat([part.flatten(2) for part in x[:3]], -1)
    weight = channels.new_ones(channels.shape[2], 4)
    gate, norm = x[2] + 1, x[2].new_ones(DEPTH)
    result, kept, new = torch.ops.k31.mega_kda(
        [channels],
        [weight],
        None,
        raw_gate,
        raw_gate[0, 0, :, 0],
        None,
        raw_beta,
        state[ROWS],
        gate,
        norm,
        norm_eps=1e-5,
    )
    state[ROWS] = new
    return result * 2, kept


IN_PLACE = (rows_of_a_pool, rows_through_views, value_first, read_before, packed)


def new_is_returned(pool, *x):
    output, new = step(*x, pool[ROWS])
    pool[ROWS] = new
    return output, new


def old_is_read_afterwards(pool, *x):
    before = pool[:2]
    output, new = step(*x, pool[ROWS])
    total = before + output.sum()
    pool[ROWS] = new
    return total


def pool_is_read_afterwards(pool, *x):
    output, new = step(*x, pool[ROWS])
    total = pool.sum() * output
    pool[ROWS] = new
    return total


def other_rows(pool, *x):
    output, new = step(*x, pool[ROWS])
    pool[ROWS + 1 - 1] = new
    return output


def transposed_on_the_way(pool, *x):
    output, new = step(*x, pool[ROWS])
    pool[ROWS] = new.transpose(2, 3)
    return output


def changed_on_the_way(pool, *x):
    output, new = step(*x, pool[ROWS])
    pool[ROWS] = new * 2
    return output


def added(pool, *x):
    output, new = step(*x, pool[ROWS])
    pool.index_put_((ROWS,), new, accumulate=True)
    return output


def another_state_was_read(pool, *x):
    output, new = step(*x, pool[ROWS] + 1)
    pool[ROWS] = new
    return output


def written_twice(pool, *x):
    output, new = step(*x, pool[ROWS])
    pool[ROWS] = new
    pool[0] = 0
    return output


NEAR_MISSES = (
    new_is_returned,
    old_is_read_afterwards,
    pool_is_read_afterwards,
    other_rows,
    transposed_on_the_way,
    changed_on_the_way,
    added,
    another_state_was_read,
    written_twice,
)


def draw_pool(program):
    square = program in (value_first, transposed_on_the_way)
    x = operands(WIDTH if square else DEPTH)
    size = BATCH if program is whole else 5
    return torch.randn(size, HEADS, WIDTH, WIDTH if square else DEPTH), x


def run_both(program):
    pool, x = draw_pool(program)
    expected_pool = pool.clone()
    expected = program(expected_pool, *x)
    captured = capture(program, pool.clone(), *x)
    count = update_states_in_place(captured.module)
    captured.module.graph.lint()
    inputs = list(captured.inputs)
    where = next(i for i, tensor in enumerate(inputs) if tensor.shape == pool.shape)
    inputs[where] = pool
    results = captured.module(*inputs)
    for got, want in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(pool, expected_pool)
    return count, operators(captured.module)


@pytest.mark.parametrize("program", [whole, *IN_PLACE], ids=lambda program: program.__name__)
def test_states_are_written_where_they_lie(program):
    count, names = run_both(program)
    assert count == 1
    assert not {"copy_", "index_put", "index", "k31.kda_recurrent", "k31.mega_kda"} & set(names)


@pytest.mark.parametrize("program", NEAR_MISSES, ids=lambda program: program.__name__)
def test_near_misses_stay_functional(program):
    count, names = run_both(program)
    assert count == 0
    assert "k31.kda_recurrent" in names


def test_a_second_run_changes_nothing():
    pool, x = draw_pool(rows_of_a_pool)
    captured = capture(rows_of_a_pool, pool, *x)
    assert update_states_in_place(captured.module) == 1
    before = str(captured.module.graph)
    assert update_states_in_place(captured.module) == 0
    assert str(captured.module.graph) == before


@pytest.mark.parametrize("program", [whole, rows_of_a_pool, packed], ids=lambda program: program.__name__)
@pytest.mark.parametrize("options", [{}, {"cache": False}], ids=["library", "inductor"])
@pytest.mark.slow
def test_what_is_built_writes_in_place(program, options):
    pool, x = draw_pool(program)
    expected_pool = pool.clone()
    compiled = torch.compile(program, backend="k31", options=options)
    with torch.no_grad():
        for _ in range(3):
            expected, results = program(expected_pool, *x), compiled(pool, *x)
            torch.testing.assert_close(results, expected)
            torch.testing.assert_close(pool, expected_pool)
