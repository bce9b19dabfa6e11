"""Loops over experts as they are published: one graph, the operator, the author's numbers, for any tokens."""

import pytest
import torch
from expert_loops import STYLES, Counted, OneHot, WeightsOfAll
from torch import nn

import k31compile

each_style = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
BOTH = {"grouped_experts": 1, "moe_gating_top_k": 1}


@each_style
@torch.no_grad()
def test_a_loop_is_one_operator_in_one_graph(style, tokens, compiled, fused):
    torch.manual_seed(1)
    layer = style().eval()
    model = compiled(layer, fullgraph=True)
    for batch, length in ((2, 5), (1, 1), (1, 9), (3, 4)):
        x = tokens(batch, length)
        torch.testing.assert_close(model(x), layer(x), atol=2e-6, rtol=1e-5)
        assert fused() == BOTH
    (leaf,) = k31compile.last_report().leaves
    assert leaf["operator"] == "grouped_experts"
    assert leaf["why"] == "loop over data"
    assert "slices/expert_loops.py:" in leaf["where"]
    assert leaf["text"] == f"confirmed on {leaf['samples']} samples in float64, by calling it"


@each_style
@torch.no_grad()
def test_a_loop_in_bfloat16_is_as_near_to_float64_as_its_author(style, tokens, compiled, fused):
    torch.manual_seed(2)
    layer = style().eval().bfloat16()
    x = tokens(dtype=torch.bfloat16)
    ours, theirs = compiled(layer, fullgraph=True)(x), layer(x)
    exact = layer.double()(x.double())
    assert fused() == BOTH
    assert ours.dtype == torch.bfloat16
    ours_off, theirs_off = ((y.double() - exact).abs().max() for y in (ours, theirs))
    assert ours_off <= 2 * theirs_off + 4e-3 * exact.abs().max()


@torch.no_grad()
def test_weights_may_be_those_of_all_experts(tokens, compiled, fused):
    layer = WeightsOfAll().eval()
    model = compiled(layer, fullgraph=True)
    for length in (5, 1, 8):
        torch.testing.assert_close(model(tokens(2, length)), layer(tokens(2, length)), atol=2e-6, rtol=1e-5)
        assert fused()["grouped_experts"] == 1


@torch.no_grad()
def test_all_tokens_on_one_expert_and_experts_without_tokens(tokens, compiled, fused):
    layer = Counted().eval()
    layer.gate.bias[:2] = 50.0
    model = compiled(layer, fullgraph=True)
    torch.testing.assert_close(model(tokens()), layer(tokens()), atol=2e-6, rtol=1e-5)
    assert fused() == BOTH


@torch.no_grad()
def test_layers_of_one_class_are_confirmed_once(tokens, compiled, fused):
    model = nn.Sequential(*(Counted() for _ in range(3))).eval()
    got = compiled(model, fullgraph=True)(tokens())
    torch.testing.assert_close(got, model(tokens()), atol=1e-4, rtol=1e-4)
    assert fused() == {name: 3 for name in BOTH}
    (leaf,) = k31compile.last_report().leaves
    assert leaf["calls"] == 3


@torch.no_grad()
def test_a_loop_inside_a_larger_model_breaks_no_graph(tokens, compiled):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Counted(), OneHot()

        def forward(self, x):
            x = x + self.first(torch.tanh(x))
            return x + self.second(torch.tanh(x))

    model = Model().eval()
    known = len(k31compile.reports())
    got = compiled(model)(tokens())
    torch.testing.assert_close(got, model(tokens()), atol=1e-5, rtol=1e-5)
    (report,) = k31compile.reports()[known:]
    assert report.fused == {name: 2 for name in BOTH}
    assert not report.notes


@torch.no_grad()
def test_other_weights_of_the_same_sizes_need_no_new_graph(tokens, compiled):
    layer, other = Counted().eval(), Counted().eval()
    model = compiled(layer)
    model(tokens())
    known = len(k31compile.reports())
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(tokens()), other(tokens()), atol=2e-6, rtol=1e-5)
    assert len(k31compile.reports()) == known


@torch.no_grad()
def test_inductor_beside_us_sees_what_was_written(tokens, compiled):
    """Somebody else's compile of the same layer is not cut."""
    layer = Counted().eval()
    compiled(layer)(tokens())
    explanation = torch._dynamo.explain(layer)(tokens())
    assert explanation.graph_break_count or explanation.graph_count != 1


def test_gradients_are_wanted(tokens, compiled):
    layer = Counted()
    model = compiled(layer)
    with torch.no_grad():
        want = layer(tokens())
    torch.testing.assert_close(model(tokens()), want, atol=2e-6, rtol=1e-5)
    assert "grouped_experts" not in k31compile.last_report().fused


@torch.no_grad()
def test_the_operator_is_left_out_by_an_option(tokens, compiled):
    layer = Counted().eval()
    model = compiled(layer, options={"fuse": ["moe_gating_top_k"]})
    torch.testing.assert_close(model(tokens()), layer(tokens()), atol=2e-6, rtol=1e-5)
    assert all("grouped_experts" not in report.fused for report in k31compile.reports()[-3:])


def test_a_check_says_that_it_does_not_compare_a_loop_which_a_compile_keeps_whole(tokens):
    torch.manual_seed(1)
    report = k31compile.check(k31compile.Entry("counted", Counted().eval(), (tokens(2, 5),)))
    (note,) = report.notes
    assert note.startswith("1 function or loop that a compile keeps whole was traced as written: 1 x grouped_experts (")
    assert "slices/expert_loops.py:" in note
    assert "what stands around a loop over data runs outside of all graphs" in note
    assert "grouped_experts" not in report.fused


def test_a_check_of_plain_code_has_no_such_note():
    report = k31compile.check(k31compile.Entry("plain", nn.Linear(4, 4).eval(), (torch.randn(2, 4),)))
    assert not report.notes
