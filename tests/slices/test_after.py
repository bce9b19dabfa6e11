"""What follows a loop over experts: a cast of its sum, or a scale that the loop has undone; and what reasons say."""

import logging

import pytest
import torch
import torch.nn.functional as F
from expert_loops import EXPERTS, WIDTH, Layer


class Wide(Layer):
    """The sum in float32 is read before it is cast."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros(flat.shape, dtype=torch.float32)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            y.index_add_(0, idx, self.experts[i](flat[idx]).float() * weights[idx, top, None])
        return F.rms_norm(y, (WIDTH,)).view(x.shape).to(x.dtype)


class Cast(Layer):
    """The sum is cast, and then read."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros(flat.shape, dtype=torch.float32)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            y.index_add_(0, idx, self.experts[i](flat[idx]).float() * weights[idx, top, None])
        y = y.to(x.dtype)
        return (y * y).view(x.shape)


class Halved(Layer):
    """Twice the experts, halved in the same block: half of it must not be taken again."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        with torch.no_grad():
            y = torch.zeros_like(flat)
            for i in range(EXPERTS):
                idx, top = torch.where(indices == i)
                y.index_add_(0, idx, 2 * self.experts[i](flat[idx]) * weights[idx, top, None])
            y = y * 0.5
        return y.view(x.shape)


class HalvedLate(Layer):
    """The same with a statement between."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        with torch.no_grad():
            y = torch.zeros_like(flat)
            for i in range(EXPERTS):
                idx, top = torch.where(indices == i)
                y.index_add_(0, idx, 4 * self.experts[i](flat[idx]) * weights[idx, top, None])
            y = y * 0.5
            y = y * 0.5
        return y.view(x.shape)


class Configured(Layer):
    """The number of experts stands in a dictionary."""

    def __init__(self):
        super().__init__()
        self.config = {"n": EXPERTS}

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros_like(flat)
        for i in range(self.config["n"]):
            idx, top = torch.where(indices == i)
            y.index_add_(0, idx, self.experts[i](flat[idx]) * weights[idx, top, None])
        return y.view(x.shape)


class Repeated(Configured):
    """One module in two places of the list."""

    def __init__(self):
        super().__init__()
        self.config, self.experts[3] = EXPERTS, self.experts[1]

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros_like(flat)
        for i in range(self.config):
            idx, top = torch.where(indices == i)
            y.index_add_(0, idx, self.experts[i](flat[idx]) * weights[idx, top, None])
        return y.view(x.shape)


@torch.no_grad()
def test_a_cast_after_the_loop_is_taken_with_it(tokens, compiled, fused):
    layer, x = Cast().eval().bfloat16(), tokens(dtype=torch.bfloat16)
    torch.testing.assert_close(compiled(layer, fullgraph=True)(x), layer(x), atol=5e-2, rtol=5e-2)
    assert fused()["grouped_experts"] == 1


@pytest.mark.parametrize("kind", [Halved, HalvedLate], ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_what_follows_the_loop_is_done_once(kind, tokens, compiled):
    layer = kind().eval()
    torch.testing.assert_close(compiled(layer)(tokens()), layer(tokens()), atol=2e-6, rtol=1e-5)


REASONS = [
    (Wide, torch.bfloat16, "in torch.float32 it differs from itself in float64"),
    (Wide, torch.bfloat16, "its tokens are torch.bfloat16: cast the sum to that right after the loop"),
    (Configured, torch.float32, "config is a dict"),
    (Configured, torch.float32, "into an attribute of the module: self.n = .."),
    (Repeated, torch.float32, "self.experts[3] and self.experts[1] are one module"),
]


@pytest.mark.parametrize(("kind", "dtype", "reason"), REASONS)
@torch.no_grad()
def test_a_reason_is_given(kind, dtype, reason, tokens, compiled, caplog):
    layer, x = kind().eval().to(dtype), tokens(dtype=dtype)
    with caplog.at_level(logging.WARNING, logger="k31compile"):
        torch.testing.assert_close(compiled(layer)(x), layer(x))
    assert reason in caplog.text
