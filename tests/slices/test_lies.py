"""Loops that are almost routed experts: their own numbers, and a sentence why they are not replaced."""

import logging

import pytest
import torch
import torch.nn.functional as F
from expert_loops import EXPERTS, WIDTH, Counted, Expert, Layer
from torch import nn

import k31compile


class Loop(Layer):
    """One loop with places for a lie."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.route(flat)
        y = torch.zeros_like(flat)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == self.name(i))
            idx, top = self.limit(idx, top)
            y[idx] += self.run(i, flat[idx]) * self.weigh(weights, idx, top)
        return y.view(x.shape)

    def route(self, x):
        return self.gate(x)

    def name(self, i):
        return i

    def limit(self, idx, top):
        return idx, top

    def run(self, i, rows):
        return self.experts[i](rows)

    def weigh(self, weights, idx, top):
        return weights[idx, top, None]


class NextExpert(Loop):
    def run(self, i, rows):
        return self.experts[(i + 1) % EXPERTS](rows)


class OneExpertTwice(Loop):
    def run(self, i, rows):
        return self.experts[max(i, 1)](rows)


class MixedMatrices(Loop):
    """The last projection of the last expert is another's."""

    def run(self, i, rows):
        expert = self.experts[i]
        return self.experts[min(i, EXPERTS - 2)].w2(F.silu(expert.w1(rows)) * expert.w3(rows))


class LastLeftOut(Loop):
    def limit(self, idx, top):
        return idx[: len(idx)], top[: len(top)]

    def name(self, i):
        return i if i < EXPERTS - 1 else -7


class Capacity(Loop):
    """An expert takes four tokens, the rest are dropped."""

    def limit(self, idx, top):
        return idx[:4], top[:4]


class LargeCapacity(Loop):
    def limit(self, idx, top):
        return idx[:300], top[:300]


class CapacityFactor(Loop):
    def limit(self, idx, top):
        return idx[: 2 + int(1.25 * len(idx) ** 0.5)], top[: 2 + int(1.25 * len(idx) ** 0.5)]


class OtherSlot(Loop):
    def weigh(self, weights, idx, top):
        return weights[idx, 1 - top, None]


class Unweighted(Loop):
    def weigh(self, weights, idx, top):
        return 1.0


class Squared(Loop):
    def weigh(self, weights, idx, top):
        return weights[idx, top, None] ** 2


class Scaled(Loop):
    def run(self, i, rows):
        return self.experts[i](rows) * 1.0001


class Gelu(Loop):
    def run(self, i, rows):
        return self.experts[i].w2(F.gelu(self.experts[i].w1(rows)) * self.experts[i].w3(rows))


class ManyTokens(Loop):
    """From 700 tokens on it does something else."""

    def limit(self, idx, top):
        return (idx, top) if len(idx) < 700 else (idx[:1], top[:1])


class Biased(Loop):
    def __init__(self):
        super().__init__(bias=True)


class NotDistinct(Loop):
    """A row may name an expert twice, and then += on indexed rows counts once."""

    def route(self, x):
        weights, indices = self.gate(x)
        return weights, indices // 2


LIES = [
    *(NextExpert, OneExpertTwice, MixedMatrices, LastLeftOut, Capacity, CapacityFactor, OtherSlot),
    *(Unweighted, Squared, Scaled, Gelu, Biased, NotDistinct),
]


@torch.no_grad()
def test_without_a_lie_it_is_replaced(tokens, compiled, fused):
    layer = Loop().eval()
    torch.testing.assert_close(compiled(layer, fullgraph=True)(tokens()), layer(tokens()), atol=2e-6, rtol=1e-5)
    assert fused()["grouped_experts"] == 1


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
@torch.no_grad()
def test_a_lie_is_noticed(lie, tokens, compiled, caplog):
    torch.manual_seed(3)
    layer = lie().eval()
    known = len(k31compile.reports())
    with caplog.at_level(logging.WARNING, logger="k31compile"):
        model = compiled(layer)
        for length in (5, 11):
            torch.testing.assert_close(model(tokens(2, length)), layer(tokens(2, length)), atol=2e-6, rtol=1e-5)
    assert not any("grouped_experts" in report.fused for report in k31compile.reports()[known:])
    assert "as routed experts it was refused" in caplog.text


@pytest.mark.parametrize("lie", [LargeCapacity, ManyTokens], ids=lambda lie: lie.__name__)
@torch.no_grad()
def test_a_lie_about_many_tokens_alone_is_served_for_few(lie, tokens, compiled, fused):
    """What it does for ten tokens was tried at ten tokens, and serves no other number."""
    layer = lie().eval()
    layer.gate.bias[:2] = 50.0
    model = compiled(layer)
    torch.testing.assert_close(model(tokens(2, 5)), layer(tokens(2, 5)), atol=2e-6, rtol=1e-5)
    assert fused()["grouped_experts"] == 1
    known = len(k31compile.reports())
    torch.testing.assert_close(model(tokens(2, 410)), layer(tokens(2, 410)), atol=2e-6, rtol=1e-5)
    assert not any("grouped_experts" in report.fused for report in k31compile.reports()[known:])


class Noted(Loop):
    """It counts in an attribute."""

    def limit(self, idx, top):
        self.seen = len(idx)
        return idx, top


class Buffered(Loop):
    """It counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("load", torch.zeros(EXPERTS))

    def run(self, i, rows):
        self.load[i] += len(rows)
        return self.experts[i](rows)


class Dropped(Loop):
    def run(self, i, rows):
        return F.dropout(self.experts[i](rows), 0.5, training=True)


class Printed(Loop):
    def run(self, i, rows):
        print("rows", len(rows))
        return self.experts[i](rows)


@pytest.mark.parametrize("kind", [Noted, Buffered, Printed], ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_what_is_done_beside_the_sum_is_still_done(kind, tokens, compiled, capsys):
    layer, twin, known = kind().eval(), kind().eval(), len(k31compile.reports())
    twin.load_state_dict(layer.state_dict())
    torch.testing.assert_close(compiled(layer)(tokens()), twin(tokens()), atol=2e-6, rtol=1e-5)
    assert not any("grouped_experts" in report.fused for report in k31compile.reports()[known:])
    if kind is Noted:
        assert layer.seen == twin.seen
    if kind is Buffered:
        assert torch.equal(layer.load, twin.load)
        assert layer.load.sum() > 0
    if kind is Printed:
        assert capsys.readouterr().out.count("rows") == 2 * EXPERTS


@torch.no_grad()
def test_random_numbers_are_not_replaced(tokens, compiled):
    layer, known = Dropped().eval(), len(k31compile.reports())
    compiled(layer)(tokens())
    assert not any("grouped_experts" in report.fused for report in k31compile.reports()[known:])


@torch.no_grad()
def test_hooks_are_called(tokens, compiled):
    layer, calls = Counted().eval(), []
    for expert in layer.experts:
        expert.register_forward_hook(lambda *_: calls.append(1))
    compiled(layer)(tokens())
    assert calls


@torch.no_grad()
def test_an_expert_with_a_forward_of_its_own(tokens, compiled):
    layer = Counted().eval()
    layer.experts[2].forward = lambda x: 2 * x
    torch.testing.assert_close(compiled(layer)(tokens()), layer(tokens()), atol=2e-6, rtol=1e-5)


@torch.no_grad()
def test_an_expert_of_another_class(tokens, compiled):
    class Doubled(Expert):
        def forward(self, x):
            return 2 * super().forward(x)

    layer = Counted().eval()
    layer.experts[4] = Doubled()
    torch.testing.assert_close(compiled(layer)(tokens()), layer(tokens()), atol=2e-6, rtol=1e-5)


@torch.no_grad()
def test_a_loop_about_something_else_is_left_alone(tokens, compiled):
    class Runs(nn.Module):
        def forward(self, x):
            total = torch.zeros(())
            for row in x.flatten(0, 1):
                if row.sum().item() > 0:
                    total = total + row.max()
            return total

    known = len(k31compile.reports())
    torch.testing.assert_close(compiled(Runs())(tokens()), Runs()(tokens()))
    assert not any(report.refused for report in k31compile.reports()[known:])
