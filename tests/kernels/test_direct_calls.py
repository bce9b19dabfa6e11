"""Calls that the built library serves without Python: the same bits and the same refusals, and who served them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from drawn_calls import OPERATORS, STATES, Draw, spoil
from torch._subclasses.fake_tensor import FakeTensorMode

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.kernels.cpu import loader
from k31compile.kernels.cpu.direct_calls import count_calls
from k31compile.kernels.in_place import IN_PLACE

DRAWN = 60
SPOILT = 250


@pytest.fixture(autouse=True)
def _taken_over():
    usable, why = loader.available()
    if not usable or count_calls("lightning_indexer") is None:
        pytest.skip(why)


def outcome(name, run, arguments, options):
    """What a call gives, with the state that it wrote, or the type and text of its refusal; nothing stays written."""
    state = arguments[STATES[name]] if name in STATES else None
    memory = state.untyped_storage() if isinstance(state, torch.Tensor) else None
    before = None if memory is None else memory.clone()
    try:
        given = run(*arguments, **options)
        written = None if memory is None else state.clone()
    except Exception as error:
        return type(error), str(error)
    finally:
        if memory is not None:
            memory.copy_(before)
    given = [given] if isinstance(given, torch.Tensor) else list(given)
    return given if written is None else [*given, written]


def same(one, other):
    if isinstance(one, tuple) or isinstance(other, tuple):
        return one == other
    return len(one) == len(other) and all(
        (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def told(given):
    return given if isinstance(given, tuple) else [(tensor.dtype, tensor.shape) for tensor in given]


def through_python(name):
    return IN_PLACE[name] if name in IN_PLACE else kernels.OPERATORS[name].run


def called(name):
    return getattr(torch.ops.k31, name)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_same_bits_as_through_python(name):
    before = count_calls(name)
    for seed in range(DRAWN):
        call = OPERATORS[name](Draw(seed))
        direct, detour = (outcome(name, run, *call) for run in (called(name), through_python(name)))
        assert isinstance(detour, list), f"seed {seed}: {detour}"
        assert same(direct, detour), f"seed {seed}"
    served, passed_on = (now - then for now, then in zip(count_calls(name), before, strict=True))
    assert served + passed_on == DRAWN
    assert served > DRAWN / 3, f"{served} of {DRAWN} calls were served"


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_wrong_is_refused_as_through_python(name):
    refused = 0
    for seed in range(SPOILT):
        draw = Draw(seed)
        call = spoil(draw, *OPERATORS[name](draw))
        detour, direct = (outcome(name, run, *call) for run in (through_python(name), called(name)))
        if isinstance(detour, tuple) and not issubclass(detour[0], OperatorError):
            # Torch's schema refuses such an argument before any of us sees it, in its own words.
            assert isinstance(direct, tuple), f"seed {seed}: {detour}"
            continue
        refused += isinstance(detour, tuple)
        assert same(direct, detour), f"seed {seed}: {told(direct)}; through Python {told(detour)}"
    assert refused > SPOILT / 5, f"{refused} of {SPOILT} calls were refused"


def test_every_operator_is_taken_over():
    assert {*kernels.OPERATORS, *IN_PLACE} == set(OPERATORS), "each operator has drawn calls here"
    unknown = [name for name in OPERATORS if count_calls(name) is None]
    assert not unknown, f"{unknown}: their schemas are not those of cpu/torch_calls.cpp"
    assert count_calls("no_such_operator") is None


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name):
    arguments, options = OPERATORS[name](Draw(1))
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(called(name).default, arguments, options, test_utils=utilities)


def test_no_fake_call_reaches_the_library():
    (query, *rest), options = OPERATORS["kda_recurrent"](Draw(2))
    before = count_calls("kda_recurrent")
    with FakeTensorMode() as mode:
        output, _ = torch.ops.k31.kda_recurrent(*(mode.from_tensor(x) for x in (query, *rest)), **options)
    assert output.shape == rest[1].shape
    assert count_calls("kda_recurrent") == before


def test_threads_do_not_meet():
    calls = [OPERATORS[name](Draw(seed)) for name in ("kda_recurrent",) for seed in range(40)]
    expected = [through_python("kda_recurrent")(*arguments, **options) for arguments, options in calls]

    def serve(number):
        arguments, options = calls[number % 40]
        return same(list(torch.ops.k31.kda_recurrent(*arguments, **options)), list(expected[number % 40]))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(serve, range(2000)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_results_are_torchs_own(mode):
    (query, *rest), options = OPERATORS["kda_recurrent"](Draw(3))
    with mode():
        output, state = torch.ops.k31.kda_recurrent(query, *rest, **options)
        assert (output.requires_grad, state.is_inference()) == (False, torch.is_inference_mode_enabled())
    assert output.untyped_storage().nbytes() == output.nbytes


def test_a_matrix_that_was_freed_is_never_read():
    """Where the experts lie is asked of each call: nothing of an earlier one is remembered."""
    draw = Draw(4)
    x, indices, weights = draw.floats(3, 8), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    for _ in range(20):
        lists = [[torch.randn(8, 8, generator=draw.numbers) for _ in range(2)] for _ in range(3)]
        direct = torch.ops.k31.grouped_experts(x, indices, weights, *lists)
        assert torch.equal(direct, through_python("grouped_experts")(x, indices, weights, *lists))
