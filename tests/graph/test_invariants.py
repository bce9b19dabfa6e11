"""Each way to break a graph is an InvariantError with the name of the pass."""

import pytest
import torch
from captured import sketch

from k31compile.errors import InvariantError
from k31compile.graph.invariants import check_invariants, take_snapshot

ATEN = torch.ops.aten


def program(cache, x):
    cache.add_(x)
    return x.sin(), x.t().cos(), x.sum(0)


def made():
    return sketch(program, torch.randn(3, 4), torch.randn(3, 4))


def wrap(module, index, operator, *arguments):
    """Put an operator behind an output."""
    output = module.graph.output_node()
    results = list(output.args[0])
    with module.graph.inserting_before(output):
        results[index] = module.graph.call_function(operator, (results[index], *arguments))
    output.args = (tuple(results),)


def copy_of(module):
    return module.graph.find_nodes(op="call_function", target=ATEN.copy_.default)[0]


def lose_the_mutation(module):
    module.graph.erase_node(copy_of(module))


def mutate_another(module):
    copy = copy_of(module)
    copy.args = (module.graph.find_nodes(op="placeholder")[1], copy.args[1])


def mutate_twice(module):
    x = module.graph.find_nodes(op="placeholder")[1]
    with module.graph.inserting_after(copy_of(module)):
        module.graph.call_function(ATEN.copy_.default, (x, x))


def drop_an_output(module):
    output = module.graph.output_node()
    output.args = (output.args[0][:1],)


def none_for_an_output(module):
    output = module.graph.output_node()
    output.args = ((output.args[0][0], None, output.args[0][2]),)


def use_before_definition(module):
    sin, cos, _ = module.graph.output_node().args[0]
    sin.args = (cos,)


def wrong_arguments(module):
    module.graph.output_node().args[0][0].args = (3, 4)


def another_argument(module):
    node = module.graph.output_node().args[0][2]
    node.args = (node.args[0], [1])


BREAKS = {
    "argument": (another_argument, "output 2 from"),
    "dtype": (lambda m: wrap(m, 0, ATEN.to.dtype, torch.float64), "output 0 from"),
    "shape": (lambda m: wrap(m, 0, ATEN.unsqueeze.default, 0), "output 0 from"),
    "stride": (lambda m: wrap(m, 1, ATEN.contiguous.default), "output 1 from"),
    "another output": (drop_an_output, "number of outputs from 3 to 1"),
    "no tensor": (none_for_an_output, "outputs?"),
    "lost mutation": (lose_the_mutation, "mutated inputs"),
    "moved mutation": (mutate_another, "mutated inputs"),
    "new mutation": (mutate_twice, "mutated inputs"),
    "order": (use_before_definition, "does not run"),
    "arguments": (wrong_arguments, "does not run"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_named(name):
    spoil, words = BREAKS[name]
    module = made().module
    before = take_snapshot(module)
    spoil(module)
    with pytest.raises(InvariantError, match=words) as caught:
        check_invariants(before, module, "spoil_it")
    assert "pass spoil_it" in caught.value.what


@pytest.mark.parametrize(
    "change",
    [lambda m: None, lambda m: wrap(m, 0, ATEN.cos.default), lambda m: wrap(m, 0, ATEN.contiguous.default)],
    ids=["nothing", "an operator", "contiguous of contiguous"],
)
def test_what_keeps_the_outputs_passes(change):
    module = made().module
    before = take_snapshot(module)
    change(module)
    check_invariants(before, module, "change_it")


def test_values_are_refreshed():
    module = made().module
    before = take_snapshot(module)
    wrap(module, 0, ATEN.cos.default)
    check_invariants(before, module, "change_it")
    assert module.graph.output_node().args[0][0].meta["val"].shape == (3, 4)


def test_a_swapped_order_of_two_mutations_is_named():
    def two(a, b):
        a.add_(1)
        b.add_(2)
        return a + b

    module = sketch(two, torch.randn(3), torch.randn(3)).module
    before = take_snapshot(module)
    first, second = module.graph.find_nodes(op="call_function", target=ATEN.copy_.default)
    second.append(first)
    with pytest.raises(InvariantError, match="mutated inputs"):
        check_invariants(before, module, "swap_them")
