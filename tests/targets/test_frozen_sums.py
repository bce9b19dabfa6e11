"""Steps mix the frozen sums where they lie where the graph allows it, and the mixture stays everywhere else."""

import pytest
import torch
from captured import capture, operators, sketch

from k31compile.kernels.registry import Choice, provider_for
from k31compile.model.attn_res import AttnRes
from k31compile.model.config import K31Config
from k31compile.targets import frozen_sums
from k31compile.targets.frozen_sums import mix_where_sums_lie

TOKENS, WIDTH, STEPS = 5, 21, 3
prepare, update = torch.ops.k31.attn_res_prepare, torch.ops.k31.attn_res_update


@pytest.fixture(autouse=True)
def _built():
    if not provider_for("attn_res_update").provider.startswith("cpu-"):
        pytest.skip("the kernels are not built here")


@pytest.fixture
def large(monkeypatch):
    """Take every bank for one that is too large to be joined."""
    monkeypatch.setattr(frozen_sums, "_WORTH_VIEWS", 0)


def draw(blocks=4, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(blocks)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    parts = [normal(TOKENS, count, WIDTH).to(dtype) for count in (1, blocks - 1)]
    return normal(TOKENS, WIDTH).to(dtype), normal(STEPS, TOKENS, WIDTH).to(dtype), normal(STEPS, WIDTH), *parts


def steps(running, deltas, queries, bank, **options):
    prepared = prepare(bank, queries, eps=1e-5, **options)
    mixed = []
    for i in range(STEPS):
        mine = (part.narrow(1, i, 1).select(1, 0) if i % 2 else part.select(1, i) for part in prepared)
        running, one = update(running, deltas[i], *mine, queries[i], eps=1e-5)
        mixed.append(one)
    return running, *mixed


def joined(running, deltas, queries, *parts):
    return steps(running, deltas, queries, torch.cat(parts, 1))


def whole(running, deltas, queries, _, bank):
    return steps(running, deltas, queries, bank)


def where_some_count(running, deltas, queries, *parts):
    return steps(running, deltas, queries, torch.cat(parts, 1), valid=torch.tensor([True, False, True, True]))


def read_by_others(running, deltas, queries, *parts):
    bank = torch.cat(parts, 1)
    return *steps(running, deltas, queries, bank), bank.sum(1)


def with_a_part_to_copy(running, deltas, queries, first, second):
    turned = second.transpose(1, 2).contiguous().transpose(1, 2)
    return steps(running, deltas, queries, torch.cat((first, turned), 1))


@pytest.mark.parametrize(
    ("program", "is_joined", "blocks"),
    [
        (joined, False, 4),
        (whole, False, 3),
        (where_some_count, False, 4),
        (read_by_others, True, 4),
        (with_a_part_to_copy, True, 4),
    ],
)
def test_steps_mix_where_the_sums_lie(program, is_joined, blocks, large):
    found = sketch(program, *draw())
    want = found.run()
    assert mix_where_sums_lie(found.module) == 1
    assert ("cat" in found.operators) == is_joined
    calls = found.module.graph.find_nodes(op="call_function", target=update.default)
    assert len(calls) == STEPS
    for i, call in enumerate(calls):
        assert sum(part.meta["val"].shape[1] for part in call.kwargs["bank"]) == blocks
        assert [value.meta["val"].shape[1:] for value in call.args[2:5]] == [(STEPS,), (STEPS,), (STEPS, blocks)]
        assert call.kwargs["slot"] == i
    for got, expected in zip(found.run(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7)
    assert mix_where_sums_lie(found.module) == 0


def test_a_small_bank_is_joined_once():
    found = sketch(joined, *draw())
    want = found.run()
    assert mix_where_sums_lie(found.module) == 1
    assert found.operators.count("cat") == 1
    for got, expected in zip(found.run(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7)


def of_the_next_query(running, deltas, queries, *parts):
    maximum, total, mixture = prepare(torch.cat(parts, 1), queries, eps=1e-5)
    return update(running, None, maximum.select(1, 0), total.select(1, 0), mixture.select(1, 1), queries[0], eps=1e-5)


def from_the_end(running, deltas, queries, *parts):
    last = (part.narrow(1, 1, 2).select(1, -1) for part in prepare(torch.cat(parts, 1), queries, eps=1e-5))
    return update(running, None, *last, queries[2], eps=1e-5)


def every_other(running, deltas, queries, *parts):
    last = (part[:, ::2].select(1, 1) for part in prepare(torch.cat(parts, 1), queries, eps=1e-5))
    return update(running, None, *last, queries[2], eps=1e-5)


@pytest.mark.parametrize("program", [of_the_next_query, from_the_end, every_other])
def test_no_slot_where_the_views_do_not_say_one(program):
    found = sketch(program, *draw())
    want = found.run()
    assert mix_where_sums_lie(found.module) == 1
    (call,) = found.module.graph.find_nodes(op="call_function", target=update.default)
    assert "slot" not in call.kwargs
    for got, expected in zip(found.run(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7)


def mixture_returned(running, deltas, queries, *parts):
    _, _, mixture = prepare(torch.cat(parts, 1), queries, eps=1e-5)
    return mixture


def mixture_divided(running, deltas, queries, *parts):
    maximum, total, mixture = prepare(torch.cat(parts, 1), queries, eps=1e-5)
    first = (part.select(1, 0) for part in (maximum, total, mixture))
    return *update(running, None, *first, queries[0], eps=1e-5), mixture / total[..., None]


def mixture_is_the_delta(running, deltas, queries, *parts):
    maximum, total, mixture = (part.select(1, 0) for part in prepare(torch.cat(parts, 1), queries, eps=1e-5))
    return update(running, mixture, maximum, total, mixture, queries[0], eps=1e-5)


def mixture_of_tokens(running, deltas, queries, *parts):
    prepared = prepare(torch.cat(parts, 1), queries, eps=1e-5)
    first = (part.select(1, 0).narrow(0, 1, 2) for part in prepared)
    return update(running[1:3], None, *first, queries[0], eps=1e-5)


@pytest.mark.parametrize("program", [mixture_returned, mixture_divided, mixture_is_the_delta, mixture_of_tokens])
def test_a_mixture_that_others_read_stays(program):
    found = sketch(program, *draw())
    before = str(found.module.graph)
    assert mix_where_sums_lie(found.module) == 0
    assert str(found.module.graph) == before


@pytest.mark.parametrize(
    ("blocks", "dtype", "count"),
    [
        (8, torch.bfloat16, 1),
        (9, torch.bfloat16, 0),
        (4, torch.float32, 1),
        (5, torch.float32, 0),
        (2, torch.float64, 0),
        (2, torch.float16, 0),
    ],
)
def test_only_where_the_sums_are_less_than_the_mixture(blocks, dtype, count):
    found = sketch(joined, *draw(blocks, dtype))
    want = found.run()
    assert mix_where_sums_lie(found.module) == count
    torch.testing.assert_close(found.run(), want, rtol=2**-7, atol=2**-7)


def test_nothing_where_the_reference_serves(monkeypatch):
    monkeypatch.setattr(frozen_sums, "provider_for", lambda _: Choice("reference", "no compiler"))
    assert mix_where_sums_lie(sketch(joined, *draw()).module) == 0


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = torch.nn.ModuleList(AttnRes(K31Config(hidden_size=WIDTH)) for _ in range(STEPS))

    def forward(self, prefix, bank, deltas):
        mixed = []
        for step, delta in zip(self.steps, deltas, strict=True):
            prefix = prefix + delta
            mixed.append(step(prefix, bank))
        return prefix, *mixed


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_model_keeps_neither_stack_nor_mixture(dynamic, monkeypatch, large):
    seen = []

    def spy(module):
        count = mix_where_sums_lie(module)
        seen.append((count, operators(module)))
        return count

    monkeypatch.setattr("k31compile.targets.cpu.mix_where_sums_lie", spy)
    torch.manual_seed(0)
    block = Block().bfloat16().eval()
    stream = [torch.randn(1, TOKENS, WIDTH).bfloat16() for _ in range(4 + STEPS)]
    arguments = stream[0], tuple(stream[1:4]), tuple(stream[4:])
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(block, backend="k31", options={"codegen": "ops"}, dynamic=dynamic)
        got, want = compiled(*arguments), block(*arguments)
    (count, names), *_ = seen
    assert count == names.count("k31.attn_res_prepare") == (STEPS if dynamic else 1)
    assert names.count("k31.attn_res_update") == STEPS
    assert names.count("cat") == (0 if dynamic else 1)  # of the queries
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_nested_bodies_too():
    found = capture(joined, *draw())
    outer = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    outer.graph.output(None)
    outer.add_submodule("body", found.module)
    assert mix_where_sums_lie(outer) == 1
