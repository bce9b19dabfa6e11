"""What a loop does beside its sum is never lost: effects, errors, numbers of tokens, settings of its modules."""

import pytest
import torch
import torch.nn.functional as F
from expert_loops import EXPERTS, SLOTS, WIDTH, Expert, Layer, OneHot
from torch import nn

import k31compile


class Loop(Layer):
    """One loop with places for something else."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros_like(flat)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            y[idx] += self.run(i, flat[idx], weights) * weights[idx, top, None]
        return y.view(x.shape)

    def run(self, i, rows, weights):
        return self.experts[i](rows)


class Meter:
    def __init__(self):
        self.count = 0

    def update(self, count):
        self.count += count


class Settings:
    scale = 1.0


class Kept(Loop):
    """Places to keep something in."""

    def __init__(self):
        super().__init__()
        self.counts, self.load, self.scales = [], [0] * EXPERTS, [1.0] * EXPERTS
        self.meter, self.settings = Meter(), Settings()
        self.register_buffer("seen", torch.zeros(EXPERTS))
        self.register_buffer("noise", torch.tensor(0.5))
        self.register_buffer("least", torch.tensor(4))


class Appended(Kept):
    def run(self, i, rows, weights):
        self.counts.append(len(rows))
        return self.experts[i](rows)


class InList(Kept):
    def run(self, i, rows, weights):
        self.load[i] += len(rows)
        return self.experts[i](rows)


class Metered(Kept):
    def run(self, i, rows, weights):
        self.meter.update(len(rows))
        return self.experts[i](rows)


class BehindAutograd(Kept):
    def run(self, i, rows, weights):
        self.seen.data[i] += len(rows)
        return self.experts[i](rows)


class BranchesOnABuffer(Kept):
    def run(self, i, rows, weights):
        return self.experts[i](rows) * (2 if self.noise > 0 else 1)


class BranchesOnANumberInABuffer(Kept):
    def run(self, i, rows, weights):
        return self.experts[i](rows) * (0 if len(rows) < self.least else 1)


class Mended(Kept):
    def run(self, i, rows, weights):
        return torch.nan_to_num(self.experts[i](rows))


class Asserts(Kept):
    def run(self, i, rows, weights):
        assert not torch.isnan(rows).any(), "no number"
        return self.experts[i](rows)


class AssertsWhatSamplesBreak(Kept):
    def run(self, i, rows, weights):
        assert weights.min() > 0
        return self.experts[i](rows)


class FailsOnSamples(Kept):
    def run(self, i, rows, weights):
        return self.experts[i](rows) if weights.min() > 0 else {}["negative"]


def kept(layer):
    return layer.counts, layer.load, layer.meter.count, layer.seen.tolist()


BESIDE = [
    *(Appended, InList, Metered, BehindAutograd, BranchesOnABuffer, BranchesOnANumberInABuffer),
    *(Mended, Asserts, AssertsWhatSamplesBreak, FailsOnSamples),
]


@pytest.mark.parametrize("kind", BESIDE, ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_it_is_still_done(kind, tokens, compiled):
    layer, twin, known = kind().eval(), kind().eval(), len(k31compile.reports())
    twin.load_state_dict(layer.state_dict())
    torch.testing.assert_close(compiled(layer)(tokens()), twin(tokens()), atol=2e-6, rtol=1e-5)
    assert kept(layer) == kept(twin)
    assert not any("grouped_experts" in report.fused for report in k31compile.reports()[known:])


@torch.no_grad()
def test_an_error_of_the_author_is_raised(tokens, compiled):
    layer, x = Asserts().eval(), tokens()
    model = compiled(layer)
    model(x)
    x[0, 0, 0] = torch.nan
    with pytest.raises(AssertionError, match="no number"):
        model(x)


@torch.no_grad()
def test_hooks_on_all_modules_are_called(tokens, compiled):
    layer, calls = Loop().eval(), []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(type(module)))
    try:
        compiled(layer)(tokens())
    finally:
        hook.remove()
    assert calls.count(Expert) == EXPERTS


@torch.no_grad()
def test_no_tokens(tokens, compiled):
    layer = Loop().eval()
    model = compiled(layer)
    assert model(tokens(0, 5)).shape == (0, 5, WIDTH)
    torch.testing.assert_close(model(tokens()), layer(tokens()), atol=2e-6, rtol=1e-5)


class Dropping(Expert):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(1.0)

    def forward(self, x):
        return self.drop(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class Dropped(Loop):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Dropping() for _ in range(EXPERTS))


class Scaled(Kept):
    def run(self, i, rows, weights):
        return self.experts[i](rows) * self.scales[i] * self.settings.scale


def _list(layer):
    layer.scales[2] = 3.0


def _settings(layer):
    layer.settings.scale = 3.0


def _dropout(layer):
    for expert in layer.experts:
        expert.drop.train()


def _forward(layer):
    layer.experts[2].forward = lambda x: 2 * x


def _linear(layer):
    layer.experts[2].w1.forward = lambda x: x[:, :10]


CHANGES = [(Scaled, _list), (Scaled, _settings), (Dropped, _dropout), (Loop, _forward), (Loop, _linear)]


@pytest.mark.parametrize(("kind", "change"), CHANGES, ids=[change.__name__ for _, change in CHANGES])
@torch.no_grad()
def test_a_change_is_followed(kind, change, tokens, compiled, fused):
    layer = kind().eval()
    model = compiled(layer)
    torch.testing.assert_close(model(tokens()), layer(tokens()), atol=2e-6, rtol=1e-5)
    assert fused()["grouped_experts"] == 1
    change(layer)
    torch.testing.assert_close(model(tokens()), layer(tokens()), atol=2e-6, rtol=1e-5)


def limited(x, indices, weights, experts, capacity):
    """Each expert takes so many tokens, the rest are dropped."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, slot = torch.where(indices == e)
        token, slot = token[:capacity], slot[:capacity]
        y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return y


class Limited(Layer):
    """The limit is given as a number."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.gate.bias.data[0] = 50.0

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        return limited(flat, indices, weights, self.experts, self.limit(len(flat))).view(x.shape)


def _fixed(_):
    return 40


def _as_many(_):
    return 10


def _width(_):
    return WIDTH


def _share(count):
    return max(count * 5 // 8, 4)


@pytest.mark.parametrize("limit", [_fixed, _as_many, _width, _share], ids=lambda limit: limit.__name__)
@torch.no_grad()
def test_a_number_that_limits_tokens(limit, tokens, compiled):
    layer = Limited(limit).eval()
    model = compiled(layer)
    for batch, length in ((2, 5), (4, 16), (4, 33)):
        x = tokens(batch, length)
        torch.testing.assert_close(model(x), layer(x), atol=2e-6, rtol=1e-5)


def stacked(x, indices, weights, first, second, third):
    """Four experts, however many matrices there are."""
    y = torch.zeros_like(x)
    for e in range(4):
        token, slot = torch.where(indices == e)
        rows = x[token]
        rows = (F.silu(rows @ first[e]) * (rows @ third[e])) @ second[e]
        y.index_add_(0, token, rows * weights[token, slot, None])
    return y


@torch.no_grad()
def test_more_matrices_than_experts(tokens, compiled):
    def layer(x, scores, *matrices):
        weights, indices = scores.topk(SLOTS, dim=-1)
        return stacked(x, indices, weights, *matrices)

    for count in (4, 8):
        torch._dynamo.reset()
        shapes = ((count, WIDTH, 10), (count, 10, WIDTH), (count, WIDTH, 10))
        given = [torch.randn(13, WIDTH), torch.randn(13, count), *(torch.randn(shape) / 4 for shape in shapes)]
        torch.testing.assert_close(compiled(layer)(*given), layer(*given), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_every_size_may_change(tokens, compiled, fused):
    layer = OneHot().eval()
    model = compiled(layer, dynamic=True, fullgraph=True)
    for batch, length in ((2, 5), (3, 4), (7, 9)):
        x = tokens(batch, length)
        torch.testing.assert_close(model(x), layer(x), atol=2e-6, rtol=1e-5)
    assert fused()["grouped_experts"] == 1
