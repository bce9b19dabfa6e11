"""Cache writes happen in place where nobody reads the old value afterwards, and nowhere else."""

import pytest
import torch
from captured import capture, name_of, operators, sketch
from torch import fx

from k31compile.targets.reinplace import reinplace_cache_writes

ATEN = torch.ops.aten
ROWS = torch.tensor([1, 3])


def cache_and_rows():
    return torch.arange(24.0).view(4, 6), torch.tensor([[-1.0], [-2.0]]).expand(2, 6).contiguous()


def index_put(cache, x):
    cache[ROWS] = x
    return cache * 2


def index_put_of_a_column(cache, x):
    cache[:, ROWS] = x.new_ones(4, 2)
    return cache * 2


def index_put_accumulate(cache, x):
    cache.index_put_((torch.tensor([1, 1]),), x, accumulate=True)
    return cache * 2


def index_copy(cache, x):
    cache.index_copy_(0, ROWS, x)
    return cache * 2


def slice_scatter(cache, x):
    cache[1:3] = x
    return cache * 2


def strided_slice(cache, x):
    cache[::2] = x
    return cache * 2


def select_scatter(cache, x):
    cache[2] = x[0]
    return cache * 2


def scatter_src(cache, x):
    cache.scatter_(0, torch.tensor([[1, 0, 1, 0, 1, 0], [2, 3, 2, 3, 2, 3]]), x)
    return cache * 2


def scatter_value(cache, x):
    cache.scatter_(0, torch.tensor([[1, 0, 1, 0, 1, 0]]), 7.0)
    return cache * 2


def through_a_view(cache, x):
    cache.view(-1)[3:9] = x[0]
    return cache * 2


def through_a_transposition(cache, x):
    cache.t()[2] = x[0, :4]
    return cache * 2


def two_writes(cache, x):
    cache[ROWS] = x
    cache[0] = x[1]
    return cache * 2


def one_over_the_other(cache, x):
    cache[1] = x[0]
    cache[1] = cache[1] * 2
    return cache * 2


def from_itself(cache, x):
    cache[ROWS] = cache[torch.tensor([0, 2])]
    return cache * 2


def shifted_by_a_row(cache, x):
    cache[1:] = cache[:-1].clone()
    return cache * 2


WRITES = [
    index_put,
    index_put_of_a_column,
    index_put_accumulate,
    index_copy,
    slice_scatter,
    strided_slice,
    select_scatter,
    scatter_src,
    scatter_value,
    through_a_view,
    through_a_transposition,
    two_writes,
    one_over_the_other,
    from_itself,
    shifted_by_a_row,
]
writes = pytest.mark.parametrize("program", WRITES, ids=lambda p: p.__name__)
SCATTERS = {"index_put", "index_copy", "slice_scatter", "select_scatter", "scatter"}


@writes
def test_the_write_happens_in_place(program):
    captured = sketch(program, *cache_and_rows())
    assert reinplace_cache_writes(captured.module) == 1
    assert not SCATTERS & set(operators(captured.module))
    captured.module.graph.lint()


@writes
def test_nothing_as_large_as_the_cache_is_copied(program):
    captured = sketch(program, *cache_and_rows())
    reinplace_cache_writes(captured.module)
    copies = captured.module.graph.find_nodes(op="call_function", target=ATEN.copy_.default)
    assert all(copy.args[0].op != "placeholder" for copy in copies)


@writes
def test_the_result_is_that_of_eager_in_the_callers_memory(program):
    captured = sketch(program, *cache_and_rows())
    reinplace_cache_writes(captured.module)
    (ours, x), (theirs, _) = cache_and_rows(), cache_and_rows()
    memory = ours.data_ptr()
    (got,) = captured.run(ours, x)
    assert torch.equal(got, program(theirs, x))
    assert torch.equal(ours, theirs)
    assert ours.data_ptr() == memory


def test_a_returned_cache_is_the_callers():
    def program(cache, x):
        cache[ROWS] = x
        return cache

    captured = sketch(program, *cache_and_rows())
    reinplace_cache_writes(captured.module)
    ours, x = cache_and_rows()
    assert captured.run(ours, x)[0].data_ptr() == ours.data_ptr()


def test_two_caches_are_both_written_in_place():
    def program(a, b, x):
        a[ROWS] = x
        b[0:2] = x + a[:2]
        return a + b

    cache, x = cache_and_rows()
    captured = sketch(program, cache, cache * 3, x)
    assert reinplace_cache_writes(captured.module) == 2
    ours, theirs = [cache.clone(), cache * 3], [cache.clone(), cache * 3]
    assert torch.equal(captured.run(*ours, x)[0], program(*theirs, x))
    assert all(map(torch.equal, ours, theirs))


def test_a_read_before_the_write_does_not_block_it():
    def program(cache, x):
        old = cache.clone()
        total = cache.t().sum()
        cache[ROWS] = x
        return old, total, cache * 2

    captured = sketch(program, *cache_and_rows())
    assert reinplace_cache_writes(captured.module) == 1
    (ours, x), (theirs, _) = cache_and_rows(), cache_and_rows()
    assert all(map(torch.equal, captured.run(ours, x), program(theirs, x)))


# Programs whose functional graph reads the old value late, which no author can write in place: made by hand.
def graph_with(read):
    """Write row 1 of a cache in place of a copy; `read(graph, cache)` reads the old cache after the write."""
    captured = sketch(select_scatter, *cache_and_rows())
    graph = captured.module.graph
    output = graph.output_node()
    with graph.inserting_before(graph.find_nodes(op="call_function", target=ATEN.copy_.default)[0]):
        late = read(graph, captured.input(0))
    output.args = ((*output.args[0], late),)
    captured.module.recompile()
    return captured


def call(graph, operator, *arguments):
    return graph.call_function(operator, arguments)


LATE_READS = {
    "itself": lambda g, cache: call(g, ATEN.mul.Tensor, cache, 3),
    "a view": lambda g, cache: call(g, ATEN.mul.Tensor, call(g, ATEN.select.int, cache, 0, 2), 3),
    "a view of a view": lambda g, cache: call(
        g, ATEN.sum.default, call(g, ATEN.select.int, call(g, ATEN.t.default, cache), 1, 2)
    ),
    "a copy": lambda g, cache: call(g, ATEN.clone.default, cache),
    "a view that escapes": lambda g, cache: call(g, ATEN.clone.default, call(g, ATEN.view.default, cache, [-1])),
}


@pytest.mark.parametrize("name", LATE_READS)
def test_a_late_read_of_the_old_value_blocks_the_write(name):
    captured = graph_with(LATE_READS[name])
    expected = captured.run(*cache_and_rows())
    assert reinplace_cache_writes(captured.module) == 0
    assert all(map(torch.equal, captured.run(*cache_and_rows()), expected))


def test_an_early_view_that_is_read_late_blocks_the_write():
    captured = graph_with(LATE_READS["itself"])
    graph = captured.module.graph
    late = graph.output_node().args[0][1]
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "call_function")):
        view = call(graph, ATEN.select.int, captured.input(0), 0, 2)
    late.args = (view, 3)
    captured.module.recompile()
    assert reinplace_cache_writes(captured.module) == 0


VIEWS = {
    "slice": (ATEN.slice.Tensor, (0, 1, 3)),
    "transpose": (ATEN.transpose.int, (0, 1)),
    "permute": (ATEN.permute.default, ([1, 0],)),
    "unsqueeze": (ATEN.unsqueeze.default, (0,)),
    "expand": (ATEN.expand.default, ([2, 4, 6],)),
    "alias": (ATEN.alias.default, ()),
    "detach": (ATEN.detach.default, ()),
    "squeeze": (ATEN.squeeze.default, ()),
    "diagonal": (ATEN.diagonal.default, ()),
    "as_strided": (ATEN.as_strided.default, ([2, 6], [6, 1], 6)),
    "unfold": (ATEN.unfold.default, (0, 2, 1)),
    "view of another type": (ATEN.view.dtype, (torch.int32,)),
    "view_as": (ATEN._reshape_alias.default, ([24], [1])),
}


@pytest.mark.parametrize("name", VIEWS)
def test_whatever_views_the_old_value_blocks_the_write(name):
    """A rewrite puts a reader where its result is needed, which may be behind a write; its operand is an early view."""
    operator, arguments = VIEWS[name]
    captured = graph_with(LATE_READS["itself"])
    graph = captured.module.graph
    late = graph.output_node().args[0][1]
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "call_function")):
        view = call(graph, operator, captured.input(0), *arguments)
    late.args = (view, 3)
    captured.module.recompile()
    expected = captured.run(*cache_and_rows())
    reinplace_cache_writes(captured.module)
    assert all(map(torch.equal, captured.run(*cache_and_rows()), expected))


def test_an_old_value_that_is_an_output_blocks_the_write():
    captured = graph_with(lambda graph, cache: call(graph, ATEN.select.int, cache, 0, 2))
    assert reinplace_cache_writes(captured.module) == 0


def test_a_read_between_two_writes_blocks_them():
    captured = sketch(two_writes, *cache_and_rows())
    graph = captured.module.graph
    first = captured.named("index_put")
    with graph.inserting_before(graph.output_node()):
        late = call(graph, ATEN.sum.default, first)
    output = graph.output_node()
    output.args = ((*output.args[0], late),)
    assert reinplace_cache_writes(captured.module) == 0


@pytest.mark.parametrize(
    "program",
    [lambda cache, x: (cache.add_(1), cache * 2)[1], lambda cache, x: (cache.mul_(x[:1]), cache * 2)[1]],
    ids=["add_", "mul_"],
)
def test_arithmetic_stays_a_final_copy(program):
    captured = sketch(program, *cache_and_rows())
    assert reinplace_cache_writes(captured.module) == 0
    assert operators(captured.module).count("copy_") == 1


def test_a_transposed_input_is_not_the_input():
    graph = fx.Graph()
    cache = graph.placeholder("cache")
    cache.meta["val"] = torch.zeros(3, 3)
    turned = call(graph, ATEN.t.default, cache)
    turned.meta["val"] = torch.zeros(3, 3)
    call(graph, ATEN.copy_.default, cache, turned)
    graph.output(())
    assert reinplace_cache_writes(fx.GraphModule(torch.nn.Module(), graph)) == 0


def test_a_part_of_a_part_is_written_alone():
    """As Llama's own code does: a batch smaller than the cache's, then a position."""

    def program(cache, x):
        cache[:3, 2:4] = x
        return cache * 2

    captured = sketch(program, torch.zeros(4, 8, 5), torch.ones(3, 2, 5))
    reinplace_cache_writes(captured.module)
    assert not SCATTERS & set(operators(captured.module))


def test_a_symbolic_position_is_written_in_place():
    def program(cache, x, position):
        cache[:, position] = x
        return cache * 2

    captured = capture(program, torch.zeros(3, 9, 5), torch.ones(3, 5), 4, dynamic=True)
    assert reinplace_cache_writes(captured.module) == 1
    assert "copy_" in {name_of(n) for n in captured.module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    inputs = [torch.zeros(3, 9, 5) if isinstance(i, torch.Tensor) and i.dim() == 3 else i for i in captured.inputs]
    (got,) = captured.run(*inputs)
    expected = torch.zeros(3, 9, 5)
    expected[:, 4] = 2
    assert torch.equal(got, expected)
