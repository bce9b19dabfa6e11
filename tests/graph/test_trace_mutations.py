"""Writes in place become pure data flow, and mutated inputs are written back by final copies."""

import pytest
import torch
from captured import capture

ROWS = torch.tensor([0, 2])


def set_item(cache, x):
    cache[:, 1] = x[:, 0]
    return cache * 2


def index_put(cache, x):
    cache.index_put_((ROWS,), x[:2])
    return cache * 2


def accumulate(cache, x):
    cache.index_put_((torch.tensor([1, 1]),), x[:2], accumulate=True)
    return cache * 2


def add(cache, x):
    cache.add_(x)
    cache += 1
    return cache * 2


def through_views(cache, x):
    cache.view(-1)[3:6].mul_(2)
    cache.t()[0].copy_(x[0])
    return cache * 2


def after_a_read(cache, x):
    old = cache * 2
    cache.zero_()
    return old, cache + x


PROGRAMS = [set_item, index_put, accumulate, add, through_views, after_a_read]
programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 3, generator=generator), torch.randn(3, 3, generator=generator)


@programs
def test_nothing_but_the_final_copy_writes(program):
    captured = capture(program, *inputs())
    targets = [n.target for n in captured.nodes if isinstance(n.target, torch._ops.OpOverload)]
    writers = [target for target in targets if target._schema.is_mutable]
    assert writers == [torch.ops.aten.copy_.default]
    assert captured.nodes[-2].target is torch.ops.aten.copy_.default


@programs
def test_the_graph_computes_and_writes_what_the_program_does(program):
    ours, x = inputs()
    theirs = ours.clone()
    expected = program(theirs, x)
    torch.testing.assert_close(capture(program, ours, x).results, expected)
    torch.testing.assert_close(ours, theirs)


def test_a_reader_after_the_write_depends_on_it():
    captured = capture(index_put, *inputs())
    assert captured.named("index_put") in captured.flow.ancestors([captured.named("mul")])


def test_a_reader_before_the_write_does_not_depend_on_it():
    captured = capture(after_a_read, *inputs())
    assert captured.flow.ancestors([captured.named("mul")]) & set(captured.nodes[:-1]) == {
        captured.input(0),
        captured.named("mul"),
    }


def test_copies_come_last_and_in_the_order_of_the_inputs():
    def program(a, b, c):
        c.add_(1)
        a.mul_(2)
        c.add_(b)
        return a + c

    captured = capture(program, *(torch.ones(2, 3) for _ in range(3)))
    copies = captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    # Dynamo numbers inputs by first use: c, a, b.
    assert [copy.args[0] for copy in copies] == [captured.input(0), captured.input(1)]
    assert captured.nodes[-3:-1] == copies
    assert captured.inputs[0].unique().tolist() == [3.0]
    assert captured.inputs[1].unique().tolist() == [2.0]


def test_an_input_that_is_only_read_is_not_copied():
    captured = capture(lambda x, y: (x + 1).mul_(y), *inputs())
    assert "copy_" not in captured.operators


def test_inputs_that_share_memory_are_refused_when_one_is_written():
    def program(pool, row):
        pool.add_(1)
        row.add_(1)
        return row * 2

    ours, theirs = torch.zeros(3, 4), torch.zeros(3, 4)
    # Dynamo wraps what a backend raises.
    with pytest.raises(Exception, match="share memory"):
        capture(program, ours, ours[1])
    apart = torch.zeros(2, 3, 4)
    capture(program, apart[0], apart[1, 1])
    torch._dynamo.reset()
    expected = program(theirs, theirs[1])
    got = torch.compile(program, backend="k31", options={"codegen": "ops"})(ours, ours[1])
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ours, theirs)


ALIASES = {
    "itself": lambda cache: cache.add_(1),
    "a row": lambda cache: cache.add_(1)[1],
    "another shape": lambda cache: cache.add_(1).view(2, 6),
    "a transposition": lambda cache: cache.add_(1).t(),
    "unchanged": lambda cache: cache[1:],
}


@pytest.mark.parametrize("name", ALIASES)
def test_a_returned_view_of_an_input_is_one(name):
    ours, theirs = torch.zeros(3, 4), torch.zeros(3, 4)
    got, expected = capture(ALIASES[name], ours).results, ALIASES[name](theirs)
    assert got.stride() == expected.stride()
    assert got.data_ptr() - ours.data_ptr() == expected.data_ptr() - theirs.data_ptr()
    assert torch.equal(got, expected)


def test_a_returned_copy_is_none():
    cache = torch.zeros(3, 4)
    assert capture(lambda cache: cache.add_(1).clone(), cache).results.data_ptr() != cache.data_ptr()


def rows_of_a_pool(program):
    """Compile once for the first row of a pool, call for the second."""
    pool = torch.arange(24.0).view(2, 3, 4)
    captured = capture(program, pool[0])
    return captured.run(pool[1])[0], program(torch.arange(24.0).view(2, 3, 4)[1])


@pytest.mark.parametrize("program", [lambda c: c.view(-1), lambda c: c.add_(1)[1]], ids=["view", "written"])
def test_a_returned_view_of_another_part_of_a_pool(program):
    got, expected = rows_of_a_pool(program)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "program",
    [lambda c: c.view(torch.int32), lambda c: torch.view_as_complex(c.view(3, 2, 2))],
    ids=["integers", "complex"],
)
def test_a_returned_view_of_another_type(program):
    cache = torch.arange(12.0).view(3, 4)
    got, expected = capture(program, cache).results, program(cache)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_a_write_to_a_buffer_is_seen_through_a_view_of_it():
    class Cache(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(3, 4))
            self.latent = self.cache[:, :2]

        def forward(self, x):
            self.cache.index_add_(0, torch.tensor([1]), x)
            return self.latent * 2

    x = torch.ones(1, 4)
    with torch.no_grad():
        got = torch.compile(Cache(), backend="k31", options={"codegen": "ops"})(x)
    torch.testing.assert_close(got, Cache()(x))
