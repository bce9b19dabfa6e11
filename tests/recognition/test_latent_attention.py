"""A step that projects a whole latent cache attends to it as it lies; what computes something else stays."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from k31compile import last_report

B, S, H, L, N, R, V = 2, 45, 3, 24, 12, 6, 9


class Step(nn.Module):
    """MLA's attention of a step over a cache of latents, without a selection; subclasses write parts in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(H * (N + V), L) * L**-0.5)

    def keys_and_values(self, c):
        return functional.linear(c, self.up).view(c.shape[0], -1, H, N + V).transpose(1, 2).split((N, V), -1)

    def forward(self, q, c, rope, shown):
        k, v = self.keys_and_values(c)
        k = torch.cat((k, rope.unsqueeze(1).expand(-1, H, -1, -1)), -1)
        return self.attend(q, k, v, shown)

    def attend(self, q, k, v, shown):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=shown, scale=0.3)


class ByHand(Step):
    def attend(self, q, k, v, shown):
        logits = (q @ k.mT) * 0.3 + torch.where(shown, 0.0, torch.finfo(q.dtype).min)
        return (logits.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2).flatten(2)


class TwoWeights(Step):
    def __init__(self) -> None:
        super().__init__()
        self.key_up, self.value_up = nn.Parameter(self.up[: H * N].clone()), nn.Parameter(self.up[H * N :].clone())

    def keys_and_values(self, c):
        return tuple(
            functional.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (self.key_up, self.value_up)
        )


class ValuesFirst(Step):
    def keys_and_values(self, c):
        v, k = torch.einsum("bsl,hnl->bhsn", c, self.up.view(H, N + V, L)).split((V, N), -1)
        return k, v


class InPlace(Step):
    def forward(self, q, c, rope, shown):
        nope, v = self.keys_and_values(c)
        k = nope.new_empty((*nope.shape[:3], N + R))
        k[..., :N] = nope
        k[..., N:] = rope.unsqueeze(1)
        return self.attend(q, k, v, shown)


class NoPositions(Step):
    def forward(self, q, c, rope, shown):
        k, v = self.keys_and_values(c)
        return self.attend(q[..., :N], k, v, shown)


class NoMask(Step):
    def forward(self, q, c, rope, shown):
        return super().forward(q, c, rope, None)


class ByPosition(Step):
    def forward(self, q, c, rope, shown):
        length = shown.sum((-1, -2), keepdim=True)
        return super().forward(q, c, rope, torch.arange(S) < length)


class SharpFirstHead(ByHand):
    def attend(self, q, k, v, shown):
        return super().attend(q * torch.tensor([2.0, *[1.0] * (H - 1)]).view(-1, 1, 1), k, v, shown)


class Sharper(ByHand):
    """Each key has its own temperature."""

    def attend(self, q, k, v, shown):
        logits = (q @ k.mT) * torch.linspace(0.5, 1.0, S) + torch.where(shown, 0.0, -1e9)
        return logits.softmax(-1) @ v


class Capped(Step):
    def attend(self, q, k, v, shown):
        logits = 5 * torch.tanh((q @ k.mT) / 5)
        return logits.masked_fill(~shown, -torch.inf).softmax(-1) @ v


class Sink(Step):
    """A sum with one more term."""

    def attend(self, q, k, v, shown):
        weights = (q @ k.mT).masked_fill(~shown, -torch.inf).exp()
        return (weights / (1 + weights.sum(-1, keepdim=True))) @ v


class Weighty(ByHand):
    """Hands on its probabilities."""

    def attend(self, q, k, v, shown):
        p = ((q @ k.mT) * 0.3).masked_fill(~shown, -torch.inf).softmax(-1)
        return p @ v, p


class GatedValues(Step):
    def keys_and_values(self, c):
        k, v = super().keys_and_values(c)
        return k, functional.silu(v)


class OtherLatent(Step):
    def forward(self, q, c, rope, shown):
        k, _ = self.keys_and_values(c)
        _, v = self.keys_and_values(c.flip(1))
        return self.attend(q, torch.cat((k, rope.unsqueeze(1).expand(-1, H, -1, -1)), -1), v, shown)


RIGHT = [Step, ByHand, TwoWeights, ValuesFirst, InPlace, NoPositions, NoMask, ByPosition]
WRONG = [Sharper, Capped, Sink, Weighty, GatedValues, OtherLatent]


def draw(rows=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = (B, H, rows, N + R), (B, S, L), (B, S, R)
    shown = torch.rand((B, 1, rows, S), generator=generator) < 0.6
    return [*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes), shown]


def run(model, operands, **kinds):
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="k31", options={"codegen": "ops", "cache": False}, **kinds)
        got, want = compiled(*operands), model(*operands)
    return got, want, last_report().fused.get("sparse_flash_attention", 0)


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_attends_to_the_latents(kind, rows):
    torch.manual_seed(0)
    model = kind().eval()
    got, want, fused = run(model, draw(rows), dynamic=False)
    assert fused == 1
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert last_report().confirmations[0]["worst_error"] < 1e-9


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_what_is_something_else_stays(kind):
    torch.manual_seed(0)
    got, want, fused = run(kind().eval(), draw(), dynamic=False)
    assert fused == 0
    torch.testing.assert_close(got, want)


def test_heads_may_have_queries_of_their_own_size():
    torch.manual_seed(0)
    got, want, _ = run(SharpFirstHead().eval(), draw(), dynamic=False)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [20, S])
def test_of_many_rows_the_projections_are_the_smaller_part(rows):
    assert run(Step().eval(), draw(rows), dynamic=False)[2] == 0


def test_bfloat16_stays_near_its_author():
    torch.manual_seed(0)
    got, want, fused = run(Step().bfloat16().eval(), draw(dtype=torch.bfloat16), dynamic=False)
    assert fused == 1
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


def test_a_row_that_sees_nothing_is_zeros_or_what_its_author_has():
    torch.manual_seed(0)
    operands = draw()
    operands[3][1] = False
    got, want, _ = run(ByHand().eval(), operands, dynamic=False)
    torch.testing.assert_close(got[:1], want[:1], rtol=1e-4, atol=1e-5)
    assert not got[1].any()


def test_a_cache_that_grows():
    torch.manual_seed(0)
    model = Step().eval()
    q, c, rope, shown = draw()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="k31", options={"codegen": "ops", "cache": False}, dynamic=True)
        for size in (40, 45, 31):
            given = q, c[:, :size], rope[:, :size], shown[..., :size]
            torch.testing.assert_close(compiled(*given), model(*given), rtol=1e-4, atol=1e-5)
