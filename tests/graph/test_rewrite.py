"""A replacement goes in with metas, in order, with the old strides; another shape or dtype is refused."""

import pytest
import torch
from captured import capture, operators, sketch
from torch import fx

from k31compile.graph.rewrite import is_dense, replace_outputs, same_sizes, same_strides, sort_topologically

X = torch.randn(3, 4)


def replace(captured, output, build, *leaves):
    return replace_outputs(captured.module, leaves or [captured.input(0)], [output], build)


def test_the_replacement_computes_in_the_old_place():
    captured = sketch(lambda x: x.sin().cos().exp(), X)
    replace(captured, captured.named("cos"), lambda x: (x * 2,))
    captured.module.recompile()
    assert captured.operators == ["mul", "exp"]
    torch.testing.assert_close(captured.run(X)[0], (X * 2).exp())


def test_new_nodes_have_values_and_the_origin_of_the_old():
    captured = capture(lambda x: x.sin().cos(), X)
    old = captured.named("cos")
    trace = old.meta["stack_trace"]
    inserted = replace(captured, old, lambda x: (x.exp() + torch.ones(4),))
    assert [node.name for node in inserted] == ["exp", "ones", "add"]
    for node in inserted:
        assert isinstance(node.meta["val"], torch.Tensor)
        assert node.meta["stack_trace"] == trace


def test_other_users_of_inner_values_are_served():
    captured = sketch(lambda x: (x.sin().cos(), x.sin().exp()), X)
    (sin, _) = captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    replace(captured, captured.named("cos"), lambda x: (x * 2,))
    captured.module.graph.lint()
    assert captured.operators.count("sin") == 1
    assert sin._erased


def test_a_replacement_may_use_its_own_output_operator():
    captured = sketch(lambda x: x.sin().cos(), X)
    replace(captured, captured.named("sin"), lambda x: (x.sin() * 2,))
    assert captured.operators == ["sin", "mul", "cos"]


ORDERS = {"transposed": (0, 2, 1), "rotated": (2, 0, 1), "reversed": (2, 1, 0), "as it was": (0, 1, 2)}


@pytest.mark.parametrize("name", ORDERS)
def test_strides_of_a_dense_output_are_kept(name):
    order = ORDERS[name]
    x = torch.randn(2, 3, 4).permute(order)
    captured = sketch(lambda x: x.sin().exp(), x)
    old = captured.named("sin").meta["val"]
    assert old.stride() == x.stride()
    replace(captured, captured.named("sin"), lambda x: ((x * 2).contiguous(),))
    new = captured.named("exp").args[0].meta["val"]
    assert new.stride() == old.stride()
    captured.module.recompile()
    torch.testing.assert_close(captured.run(x)[0], (x * 2).exp())


def test_strides_that_are_right_cost_no_copy():
    captured = sketch(lambda x: x.sin().exp(), X)
    replace(captured, captured.named("sin"), lambda x: (x.cos(),))
    assert captured.operators == ["cos", "exp"]


@pytest.mark.parametrize(
    "build",
    [lambda x: (x[:2],), lambda x: (x.double(),), lambda x: (x.to("meta"),), lambda x: (x.t(),)],
    ids=["shape", "dtype", "device", "transposed"],
)
def test_another_kind_of_value_is_refused(build):
    captured = sketch(lambda x: x.sin().exp(), X)
    before = captured.operators
    with pytest.raises(ValueError, match="the replacement gives"):
        replace(captured, captured.named("sin"), build)
    assert captured.operators == before


def test_another_rank_is_refused():
    captured = sketch(lambda x: x.sin().exp(), X)
    with pytest.raises(ValueError, match="the replacement gives"):
        replace(captured, captured.named("sin"), lambda x: (x.sum(0),))


def test_an_operand_that_stands_later_is_waited_for():
    captured = sketch(lambda x, y: (x.sin().exp(), y.cos()), X, X)
    replace(captured, captured.named("sin"), lambda c: (c * 2,), captured.named("cos"))
    captured.module.graph.lint()
    assert captured.operators == ["cos", "mul", "exp"]


def test_constants_of_the_replacement_come_along():
    captured = sketch(lambda x: x.sin().exp(), X)
    replace(captured, captured.named("sin"), lambda x: (x + torch.tensor([1.0, 2.0, 3.0, 4.0]),))
    captured.module.recompile()
    torch.testing.assert_close(captured.run(X)[0], (X + torch.tensor([1.0, 2.0, 3.0, 4.0])).exp())


def test_symbolic_shapes_are_kept_without_a_guard():
    captured = capture(lambda x: x.sin().exp(), torch.randn(5, 4), dynamic=True)
    env = captured.input(0).meta["val"].fake_mode.shape_env
    guards = len(env.guards)
    replace(captured, captured.named("sin"), lambda x: (x.new_zeros(x.shape[0], x.shape[1]) + x,))
    assert len(env.guards) == guards
    captured.module.recompile()
    x = torch.randn(7, 4)
    inputs = [x if isinstance(i, torch.Tensor) else {5: 7}.get(i, i) for i in captured.inputs]
    torch.testing.assert_close(captured.run(*inputs)[0], x.exp())


def test_sorting_keeps_what_is_in_order():
    captured = sketch(lambda x: (x.sin() + x.cos()).exp(), X)
    before = captured.nodes
    sort_topologically(captured.module.graph)
    assert captured.nodes == before


def test_sorting_moves_a_node_behind_its_inputs():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.sin.default, (x,))
    last = graph.call_function(torch.ops.aten.cos.default, (x,))
    graph.output((first,))
    first.args = (last,)
    sort_topologically(graph)
    graph.lint()
    assert operators(fx.GraphModule(torch.nn.Module(), graph)) == ["cos", "sin"]


DENSE = {
    "contiguous": (torch.empty(2, 3), True),
    "transposed": (torch.empty(2, 3).t(), True),
    "of size one": (torch.empty(2, 3)[:1].unsqueeze(1), True),
    "strided": (torch.empty(2, 6)[:, ::2], False),
    "expanded": (torch.empty(2, 1).expand(2, 3), False),
    "narrowed": (torch.empty(4, 3)[:, :2], False),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_means_no_gap_and_no_overlap(name):
    tensor, dense = DENSE[name]
    assert is_dense(tensor) is dense


def test_the_stride_of_a_dimension_of_one_says_nothing():
    assert same_strides(torch.empty(1, 4), torch.empty_strided((1, 4), (9, 1)))
    assert not same_strides(torch.empty(2, 4), torch.empty_strided((2, 4), (9, 1)))


def test_sizes_are_compared_as_expressions():
    captured = capture(lambda x: x.sin(), torch.randn(5, 6), dynamic=True)
    rows, columns = captured.input(0).meta["val"].shape
    assert same_sizes([rows], [rows])
    assert not same_sizes([rows], [columns])
    assert not same_sizes([rows], [5])
    assert not same_sizes([rows], [rows, rows])
