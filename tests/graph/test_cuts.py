"""The leaves of a region: a cut by bytes, nearest to the core, through nothing but what fits a role."""

import torch
import torch.nn.functional as F
from captured import sketch

from k31compile.graph import cuts
from k31compile.graph.cuts import Leak, find_leaves
from k31compile.graph.sizes import shape_of

T, D, WIDE, LOW = 5, 6, 32, 3
X, PROJECTION = torch.randn(T, WIDE), torch.randn(3 * D, WIDE)


def shaped(*shapes):
    return lambda node: shape_of(node) in shapes


def leaves_of(captured, core, eligible, kept=()):
    return find_leaves(captured.flow, {captured.named(name) for name in core}, eligible, kept)


def names(leaves):
    return [leaf.name for leaf in leaves]


def wide_projection(x, weight):
    q, k, v = F.linear(x, weight).split(D, dim=-1)
    return F.scaled_dot_product_attention(q.sigmoid(), k.tanh(), v.exp())


def test_three_operands_out_of_one_wide_tensor():
    """By count the wide tensor would be the cut: one instead of three."""
    captured = sketch(wide_projection, X, PROJECTION)
    leaves = leaves_of(captured, ["scaled_dot_product_attention"], shaped((T, D), (T, 3 * D)))
    assert names(leaves) == ["sigmoid", "tanh", "exp"]


def test_fewer_bytes_above_win_where_both_fit():
    def program(x, y):
        return torch.cat([x, x, x, y], dim=1).sin() @ torch.ones(3 * D + 2, 1)

    captured = sketch(program, torch.randn(T, D), torch.randn(T, 2))
    leaves = leaves_of(captured, ["matmul"], shaped((T, D), (T, 2), (T, 3 * D + 2)))
    assert leaves == (captured.input(0), captured.input(1))


def test_a_low_rank_projection_is_not_cut():
    """It has the fewest bytes of all and the shape of no operand."""

    def program(x, down, up):
        return F.linear(F.linear(x, down), up).relu() @ torch.ones(D, 2)

    captured = sketch(program, X, torch.randn(LOW, WIDE), torch.randn(D, LOW))
    leaves = leaves_of(captured, ["matmul"], shaped((T, D)))
    assert names(leaves) == ["relu"]


def test_the_nearest_of_equal_cuts():
    captured = sketch(lambda x: x.sin().cos().exp().sum(-1), X)
    assert names(leaves_of(captured, ["sum"], shaped((T, WIDE)))) == ["exp"]


def test_a_leaf_computed_from_another_is_pushed_inside():
    def program(x):
        k = x.sin()
        return (k * 0.3).tanh() @ k.t().exp()

    captured = sketch(program, X)
    leaves = leaves_of(captured, ["matmul", "exp", "t"], shaped((T, WIDE)))
    assert names(leaves) == ["sin"]


def test_without_dependence_both_are_leaves():
    captured = sketch(lambda x, y: x.tanh() @ y.sin().t(), X, X.clone())
    assert names(leaves_of(captured, ["matmul", "t"], shaped((T, WIDE)))) == ["tanh", "sin"]


def test_integers_may_be_computed_from_a_leaf():
    def program(x, first):
        k = x.sin()
        return k.gather(1, (k.argmax(-1, keepdim=True) + first) % WIDE)

    captured = sketch(program, X, torch.ones(T, 1, dtype=torch.int64))
    assert names(leaves_of(captured, ["gather"], shaped((T, WIDE), (T, 1)))) == ["sin", "remainder"]


def test_three_slices_of_one_tensor_are_that_tensor():
    def program(x):
        heads = x.sin()
        return torch.stack([heads[:, i] for i in range(4)]).sum(0)

    captured = sketch(program, torch.randn(T, 4, 2))
    assert names(leaves_of(captured, ["stack"], shaped((T, 2), (T, 4, 2)))) == ["sin"]


def test_two_slices_stay_two():
    captured = sketch(lambda x: x.sin()[:, 0] * x.sin()[:, 1].exp(), torch.randn(T, 4, 2))
    assert len(leaves_of(captured, ["mul"], shaped((T, 2)))) == 2


def test_a_leak_names_its_path():
    captured = sketch(lambda x, y: (x.sin() * y.mean().cos()).sum(), X, torch.randn(7, 7))
    leak = leaves_of(captured, ["sum", "mul"], shaped((T, WIDE)))
    assert isinstance(leak, Leak)
    assert leak.path == (captured.input(1), captured.named("mean"), captured.named("cos"))


def test_a_core_that_holds_an_input_leaks_there():
    captured = sketch(lambda x: x.sin(), X)
    leak = find_leaves(captured.flow, {captured.input(0)}, shaped((T, WIDE)))
    assert leak == Leak((captured.input(0),))


def test_kept_leaves_need_no_role():
    captured = sketch(lambda x, y: (x.sin() * y.mean().cos()).sum(), X, torch.randn(7, 7))
    leaves = leaves_of(captured, ["sum", "mul"], shaped((T, WIDE)), kept=[captured.named("cos")])
    assert names(leaves) == ["sin", "cos"]


def test_nothing_is_looked_at_behind_a_kept_leaf():
    captured = sketch(lambda x: x.sin().mean().cos().exp() * x, X)
    cos = captured.named("cos")
    leaves = leaves_of(captured, ["exp"], shaped((T, WIDE)), kept=[cos])
    assert leaves == (cos,)


def test_constants_are_never_leaves():
    captured = sketch(lambda x: x.sin() + torch.arange(WIDE) * torch.ones(T, WIDE), X)
    assert names(leaves_of(captured, ["add"], shaped((T, WIDE)))) == ["sin"]


def test_a_core_of_constants_has_no_leaves():
    captured = sketch(lambda x: (torch.arange(4).exp(), x), X)
    assert leaves_of(captured, ["exp"], shaped((T, WIDE))) == ()


def chain(x):
    y = x.sin()
    for _ in range(8):
        y = y.reshape(-1).cos()
    return y.sum()


def test_a_cut_inside_the_window_is_found(monkeypatch):
    captured = sketch(chain, X)
    monkeypatch.setattr(cuts, "WINDOW_NODES", 40)
    assert names(leaves_of(captured, ["sum"], shaped((T, WIDE)))) == ["sin"]


def test_beyond_the_window_nothing_is_looked_for(monkeypatch):
    captured = sketch(chain, X)
    monkeypatch.setattr(cuts, "WINDOW_NODES", 5)
    leak = leaves_of(captured, ["sum"], shaped((T, WIDE)))
    assert isinstance(leak, Leak)
    assert len(leak.path) == 5


def test_no_more_than_the_window_is_asked_about(monkeypatch):
    monkeypatch.setattr(cuts, "WINDOW_NODES", 12)
    captured = sketch(chain, X)
    asked = set()
    leaves_of(captured, ["sum"], lambda node: asked.add(node) or False)
    assert 0 < len(asked) <= 12
