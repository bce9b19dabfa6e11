"""The delta-rule operators as torch sees them, what they refuse, and the same bits whatever the threads do."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from delta_cases import definition, draw, value_first, within
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from k31compile.errors import OperatorError
from k31compile.kernels.cpu.delta_rule import chunk_provider

NAMES = ("kda_recurrent", "kda_chunk", "gated_delta_recurrent", "gated_delta_chunk")
ONES = torch.ones


def operator(name):
    return getattr(torch.ops.k31, name).default


def draw_for(name, *sizes, **options):
    case = draw(*sizes, **options)
    return case | {"gate": case["gate"][..., 0]} if name.startswith("gated") else case


def split(case):
    """Positional arguments, and those that go by name."""
    named = {name: case[name] for name in ("scale", "state_layout", "cu_seqlens") if name in case}
    return tuple(value for name, value in case.items() if name not in named), named


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor"])
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_opcheck(name, utility, layout):
    case = draw_for(name, 2, 19, 3, 5, 7, dtype=torch.bfloat16) | {"scale": 0.3}
    arguments, options = split(case if layout == "KV" else value_first(case))
    torch.library.opcheck(operator(name), arguments, options, test_utils=utility)


@pytest.mark.parametrize("name", ["kda_chunk", "gated_delta_chunk"])
@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor"])
def test_opcheck_of_ragged_sequences(name, utility):
    case = draw_for(name, 1, 19, 3, 5, 7)
    del case["initial_state"]
    options = {"cu_seqlens": torch.tensor([0, 4, 4, 19])}
    torch.library.opcheck(operator(name), tuple(case.values()), options, test_utils=utility)


@pytest.mark.parametrize("name", NAMES)
def test_fakes_agree_and_symbolic_sizes_stay_symbolic(name):
    case = draw_for(name, 2, 9, 3, 5, 7)
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)

    def symbolic(tensor):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
        return mode.from_tensor(tensor, symbolic_context=context)

    fakes = {key: symbolic(tensor) for key, tensor in case.items()}
    with mode:
        outputs = operator(name)(*fakes.values())
    assert all(isinstance(size, torch.SymInt) for output in outputs for size in output.shape)
    assert not environment.guards
    for fake, real in zip(outputs, operator(name)(*case.values()), strict=True):
        assert tuple(map(int, fake.shape)) == real.shape
        assert (fake.dtype, tuple(map(int, fake.stride()))) == (real.dtype, real.stride())


def test_inside_inductor_under_autocast():
    def model(query, *rest):
        output, last = torch.ops.k31.kda_chunk(query * 2, *rest, scale=0.3)
        return output.relu(), last

    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    for length in (3, 18, 21):
        case = draw(2, length, 3, 5, 7)
        expected = definition(**case, scale=0.6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            within(6e-7, compiled(*case.values()), (expected[0].relu(), expected[1]))


def _case(**changes):
    return draw(2, 3, 4, 5, 7) | changes


BAD_CALLS = [
    ({"query": ONES(3, 4, 5)}, r"query must be \[B, T, H, K\], not \[3, 4, 5\]"),
    ({"query": ONES(2, 3, 4, 5).int()}, "query must be floating point"),
    ({"key": ONES(2, 3, 4, 6)}, r"key must have shape \[2, 3, 4, 5\], not \[2, 3, 4, 6\]"),
    ({"key": ONES(2, 3, 4, 5).to("meta")}, "key is on meta, query on cpu"),
    ({"value": ONES(2, 3, 4)}, r"value must be \[B, T, H, V\]"),
    ({"value": ONES(2, 4, 4, 7)}, r"value must have shape \[2, 3, 4, 7\]"),
    ({"gate": ONES(2, 3, 4)}, r"gate must be \[B, T, H, K\]"),
    ({"gate": ONES(2, 3, 5, 5)}, r"gate must begin with \[B, T, H\] = \[2, 3, 4\], not \[2, 3, 5\]"),
    ({"gate": ONES(2, 3, 4, 1)}, r"gate must have shape \[2, 3, 4, 5\]"),
    ({"beta": ONES(2, 3, 4, 1)}, r"beta must have shape \[2, 3, 4\]"),
    ({"beta": ONES(2, 3, 4).long()}, "beta must be floating point"),
    ({"initial_state": ONES(2, 4, 7, 5)}, r"initial_state must have shape \[2, 4, 5, 7\], not \[2, 4, 7, 5\]"),
    ({"state_layout": "VK"}, r"initial_state must have shape \[2, 4, 7, 5\], not \[2, 4, 5, 7\]"),
    ({"initial_state": ONES(2, 4, 5, 7).int()}, "initial_state must be floating point"),
    ({"state_layout": "kv"}, "state_layout must be 'KV' or 'VK', not 'kv'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_bad_calls_are_refused_by_name(delta, changes, message):
    with pytest.raises(OperatorError, match=message):
        delta(**_case(**changes))


BAD_LIMITS = [
    (ONES(2), "cu_seqlens must hold integers"),
    (ONES(1, 2).int(), r"cu_seqlens must have shape \[N \+ 1\]"),
    (ONES(0).int(), r"cu_seqlens must have shape \[N \+ 1\]"),
    (torch.tensor([0, 8]), r"cu_seqlens must ascend from 0 to 9, not \[0, 8\]"),
    (torch.tensor([1, 9]), "cu_seqlens must ascend from 0 to 9"),
    (torch.tensor([0, 5, 4, 9]), "cu_seqlens must ascend from 0 to 9"),
    (torch.tensor([0, 2**40, 9]), "cu_seqlens must ascend from 0 to 9"),
    (torch.tensor([0, -(2**40), 9]), "cu_seqlens must ascend from 0 to 9"),
]


@pytest.mark.parametrize(("limits", "message"), BAD_LIMITS, ids=str)
def test_bad_limits_are_refused(chunk, limits, message):
    case = draw(1, 9, 3, 5, 7)
    del case["initial_state"]
    with pytest.raises(OperatorError, match=message):
        chunk(**case, cu_seqlens=limits)
    with pytest.raises(OperatorError, match="cu_seqlens divides one row of tokens, but the batch is 2"):
        chunk(**draw(2, 9, 3, 5, 7), cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(OperatorError, match=r"initial_state must have shape \[2, 3, 5, 7\]"):
        chunk(**draw(1, 9, 3, 5, 7), cu_seqlens=torch.tensor([0, 4, 9]))


@pytest.mark.parametrize("sizes", [(3, 1, 200, 24, 20), (3, 37, 5, 40, 24)], ids=str)  # both worth a second thread
def test_threads_and_repetitions_agree(delta, two_threads, sizes):
    case = draw(*sizes, dtype=torch.bfloat16)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [delta(**case) for _ in range(2)]
    for output, last in results:
        assert torch.equal(output, results[0][0])
        assert torch.equal(last, results[0][1])


def test_several_callers_at_once(delta):
    cases = [draw(2, 3 + 9 * i, 3, 8 + 5 * i, 12, seed=i) for i in range(6)]
    alone = [delta(**case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: delta(**case), cases * 5))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(alone * 5, together, strict=True))


@pytest.mark.parametrize("sides", [(600, 500), (1100, 2), (2, 1100)], ids=str)
def test_a_state_too_large_for_scratch_goes_to_the_reference(sides):
    case = draw(1, 2, 1, *sides)
    reason = chunk_provider().declines(*case.values())
    assert reason == f"a head's state of {sides[0]} x {sides[1]} does not fit the kernel's scratch"
    within(6e-7, torch.ops.k31.kda_chunk(*case.values()), definition(**case))


def test_states_just_within_the_scratch(chunk):
    for sides in ((1024, 3), (3, 1024), (512, 512)):
        case = draw(1, 17, 1, *sides)
        within(2e-6, chunk(**case), definition(**case))
