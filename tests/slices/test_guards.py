"""What a replaced loop read is guarded: a change of it gives a new graph, and the new numbers."""

import expert_loops
import pytest
import torch
import torch.nn.functional as F
from expert_loops import Counted, Expert, MaskedRows, NumberedExperts


def assert_follows(model, layer, x):
    torch.testing.assert_close(model(x), layer(x), atol=2e-6, rtol=1e-5)


@torch.no_grad()
def test_an_attribute_that_bounds_the_activation(tokens, compiled, fused):
    layer = MaskedRows().eval()
    model = compiled(layer)
    assert_follows(model, layer, 5 * tokens())
    assert fused()["grouped_experts"] == 1
    for expert in layer.experts:
        expert.beta = 2.0
    assert_follows(model, layer, 5 * tokens())
    layer.experts[3].beta = 7.0
    assert_follows(model, layer, 5 * tokens())


@torch.no_grad()
def test_an_expert_that_is_replaced(tokens, compiled):
    class Other(Expert):
        def forward(self, x):
            return self.w2(F.gelu(self.w1(x)) * self.w3(x))

    layer = Counted().eval()
    model = compiled(layer)
    assert_follows(model, layer, tokens())
    layer.experts[1] = Expert()
    assert_follows(model, layer, tokens())
    layer.experts[2] = Other()
    assert_follows(model, layer, tokens())


@torch.no_grad()
def test_a_method_of_the_expert(tokens, compiled, monkeypatch):
    layer = Counted().eval()
    model = compiled(layer)
    assert_follows(model, layer, tokens())
    monkeypatch.setattr(Expert, "forward", lambda self, x: self.w2(F.gelu(self.w1(x)) * self.w3(x)))
    assert_follows(model, layer, tokens())


@pytest.mark.parametrize("value", [4, 5])
@torch.no_grad()
def test_a_global_of_the_loop(tokens, compiled, monkeypatch, value):
    layer = Counted().eval()
    model = compiled(layer)
    assert_follows(model, layer, tokens())
    monkeypatch.setattr(expert_loops, "EXPERTS", value)
    x = tokens()
    layer.gate.bias[value:] = -50.0
    assert_follows(model, layer, x)


@torch.no_grad()
def test_a_bias_that_is_given_later(tokens, compiled):
    layer = Counted().eval()
    model = compiled(layer)
    assert_follows(model, layer, tokens())
    layer.experts[0].w2.bias = torch.nn.Parameter(torch.ones(expert_loops.WIDTH))
    assert_follows(model, layer, tokens())


@torch.no_grad()
def test_a_static_method(tokens, compiled, monkeypatch):
    layer = NumberedExperts().eval()
    model = compiled(layer)
    assert_follows(model, layer, tokens())
    monkeypatch.setattr(NumberedExperts, "activate", staticmethod(lambda gate, up: F.gelu(gate) * up))
    assert_follows(model, layer, tokens())


@torch.no_grad()
def test_an_expert_that_is_added(tokens, compiled):
    layer = MaskedRows().eval()
    last = layer.experts.pop(-1)
    model = compiled(layer)
    assert_follows(model, layer, tokens())
    layer.experts.append(last)
    assert_follows(model, layer, tokens())


@torch.no_grad()
def test_matrices_that_become_one(tokens, compiled):
    layer = Counted().eval()
    model = compiled(layer)
    assert_follows(model, layer, tokens())
    layer.experts[0].w1.weight = layer.experts[1].w1.weight
    assert_follows(model, layer, tokens())
