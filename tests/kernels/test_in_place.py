"""States that are read and written where they lie: every build against the definition, and the pool around them."""

import pytest
import test_mega_kda as mega
import torch
from delta_cases import definition, draw, relative

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.kernels.cpu import loader
from k31compile.kernels.cpu.delta_rule import recurrent_in_place_provider
from k31compile.kernels.cpu.mega_kda import mega_kda_in_place_provider

SIZES = [(2, 1, 3, 5, 7), (3, 2, 4, 128, 128), (1, 3, 2, 40, 24), (2, 1, 2, 16, 150), (2, 8, 1, 33, 65)]
VARIANTS = ("fast", "portable", "avx2", "wide")
ROWS = torch.tensor([5, -6, 3])
STATES = 7


@pytest.fixture(params=VARIANTS)
def variant(request):
    usable, why = loader.available(request.param)
    if not usable:
        pytest.skip(why)
    return request.param


def pool_of(states, layout="KV"):
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(STATES, *states.shape[1:], generator=generator)
    return pool if layout == "KV" else pool.mT.contiguous()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_pool(variant, sizes, layout, dtype):
    case = draw(*sizes, dtype=dtype)
    pool, rows = pool_of(case["initial_state"], layout), ROWS[: sizes[0]]
    before = pool.clone()
    states = before[rows] if layout == "KV" else before[rows].mT
    expected, last = definition(**case | {"initial_state": states}, scale=0.3)
    operands = list(case.values())[:5]
    output = recurrent_in_place_provider(variant).run(*operands, pool, rows=rows, scale=0.3, state_layout=layout)
    assert relative(output, expected) < 1e-6
    assert relative(pool[rows], last if layout == "KV" else last.mT) < 1e-6
    others = [row for row in range(STATES) if row not in (rows % STATES).tolist()]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_whole_states_and_the_same_bits_as_to_new_memory(variant, sizes, layout):
    case = draw(*sizes)
    state = case["initial_state"] if layout == "KV" else case["initial_state"].mT.contiguous()
    operands = list(case.values())[:5]
    functional = kernels.OPERATORS["kda_recurrent"].reference
    if variant == "fast":
        functional = torch.ops.k31.kda_recurrent
    expected, last = functional(*operands, state, state_layout=layout)
    # A state between other things, its rows apart.
    wide = torch.full((*state.shape[:3], state.shape[3] + 3), 7.0)
    held = wide[..., : state.shape[3]]
    held.copy_(state)
    output = recurrent_in_place_provider(variant).run(*operands, held, state_layout=layout)
    if variant == "fast":
        assert torch.equal(output, expected)
        assert torch.equal(held, last)
    assert relative(output, expected) < 1e-6
    assert relative(held, last) < 1e-6
    assert (wide[..., state.shape[3] :] == 7.0).all()


@pytest.mark.parametrize("sizes", mega.SIZES, ids=str)
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_mega_kda_rows_of_a_pool(variant, sizes, layout):
    case = mega.draw(sizes)
    pool, rows = pool_of(case["state"], layout), ROWS[: sizes[0]]
    case |= {"state": pool[rows], "state_layout": layout}
    expected, kept, last = kernels.mega_kda_reference(**mega.each(case, torch.Tensor.double))
    before = pool.clone()
    named = {name: case.pop(name) for name in ("norm_eps", "scale", "state_layout")}
    operands = [pool if name == "state" else value for name, value in case.items()]
    result, inputs = mega_kda_in_place_provider(variant).run(*operands, rows=rows, **named)
    assert relative(result, expected) < 1e-5
    assert torch.equal(inputs.double(), kept)
    assert relative(pool[rows], last) < 1e-6
    others = [row for row in range(STATES) if row not in (rows % STATES).tolist()]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("rows", [[2, 2], [2, -5]], ids=str)
def test_a_state_that_is_named_twice_is_read_before_it_is_written(rows):
    case = draw(2, 1, 3, 5, 7)
    pool, rows = pool_of(case["initial_state"]), torch.tensor(rows)
    before = pool.clone()
    operands = list(case.values())[:5]
    expected, _ = definition(**case | {"initial_state": before[rows]})
    assert relative(torch.ops.k31.kda_recurrent_(*operands, pool, rows=rows), expected) < 1e-6
    others = [row for row in range(STATES) if row != 2]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize(
    "change", [torch.Tensor.double, lambda state: state.mT.contiguous().mT], ids=["wide", "across"]
)
def test_what_the_kernel_does_not_write_is_copied(change):
    case = draw(2, 1, 3, 5, 7)
    state = change(case["initial_state"])
    expected, last = definition(**case)
    output = torch.ops.k31.kda_recurrent_(*list(case.values())[:5], state)
    assert relative(output, expected) < 1e-6
    assert relative(state, last) < 1e-6


BAD_ROWS = [
    (torch.tensor([1, 7]), "rows holds 7, but the pool has 7 states"),
    (torch.tensor([1, -8]), "rows holds -8, but the pool has 7 states"),
    (torch.tensor([1, 2, 3]), "rows must be 2 integers, one a request"),
    (torch.tensor([[1, 2]]), "rows must be 2 integers, one a request"),
    (torch.tensor([1.0, 2.0]), "rows must be 2 integers, one a request"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS, ids=[message for _, message in BAD_ROWS])
def test_bad_rows_are_refused(variant, rows, message):
    case = draw(2, 1, 3, 5, 7)
    pool = pool_of(case["initial_state"])
    before = pool.clone()
    with pytest.raises(OperatorError, match=message):
        recurrent_in_place_provider(variant).run(*list(case.values())[:5], pool, rows=rows)
    assert torch.equal(pool, before)


def test_a_pool_of_another_shape_is_refused(variant):
    case, run = draw(2, 1, 3, 5, 7), recurrent_in_place_provider(variant).run
    with pytest.raises(OperatorError, match=r"state must have shape \[7, 3, 5, 7\], not \[7, 3, 7, 5\]"):
        run(*list(case.values())[:5], pool_of(case["initial_state"], "VK"), rows=ROWS[:2])


@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor"])
@pytest.mark.parametrize("rows", [None, ROWS[:2]], ids=["whole", "rows"])
def test_opcheck(utility, rows):
    case = draw(2, 1, 3, 5, 7)
    state = case["initial_state"] if rows is None else pool_of(case["initial_state"])
    arguments = (*list(case.values())[:5], state)
    torch.library.opcheck(torch.ops.k31.kda_recurrent_.default, arguments, {"rows": rows}, test_utils=utility)


def test_two_threads_give_the_same_bits(two_threads):
    case = draw(8, 1, 16, 128, 128)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        pool = case["initial_state"].clone()
        results.append((torch.ops.k31.kda_recurrent_(*list(case.values())[:5], pool), pool))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
