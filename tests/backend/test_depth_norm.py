"""The RMS norm behind an attention over depth goes into its update, where nobody else reads the rows and bits agree."""

import pytest
import torch
import torch.nn.functional as F
from running import relative_error, run

B, T, N, D = 2, 5, 3, 24
UPDATE = "attn_res_update"


def operands(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return normal(N, B, T, D), normal(B, T, D), normal(D), 1 + 0.3 * normal(D)


def mixed(bank, running, query, dtype):
    rows = torch.stack([*bank.unbind(0), running], dim=-2).float()
    logits = (rows * query.float()).sum(-1) * torch.rsqrt(rows.square().mean(-1) + 1e-5)
    return (logits.softmax(-1).unsqueeze(-1) * rows).sum(-2).to(dtype)


def by_hand(h, weight):
    wide = h.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(h.dtype)


def divided(h, weight):
    wide = h.float()
    return (weight.float() * (wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-6))).to(h.dtype)


def functional(h, weight):
    return F.rms_norm(h.float(), (D,), weight.float(), 1e-6).to(h.dtype)


def weight_after_the_cast(h, weight):
    wide = h.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(h.dtype)


def centred(h, weight):
    return F.layer_norm(h.float(), (D,), weight.float(), None, 1e-6).to(h.dtype)


def eps_outside(h, weight):
    wide = h.float()
    return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + 1e-6) * weight.float()).to(h.dtype)


def summed(h, weight):
    wide = h.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6) * weight.float()).to(h.dtype)


def with_norm(rewritten, norm, dtype=torch.float32, seed=0):
    def program(bank, running, query, weight):
        return norm(mixed(bank, running, query, dtype), weight)

    done = run(program, *operands(dtype, seed), stable=False)
    (update,) = rewritten[-1].graph.find_nodes(op="call_function", target=torch.ops.k31.attn_res_update.default)
    return done, update.kwargs.get("norm_weight") is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [by_hand, divided, functional], ids=lambda f: f.__name__)
def test_a_norm_is_taken_in(norm, dtype, rewritten):
    done, taken = with_norm(rewritten, norm, dtype)
    assert taken
    assert done.fused[UPDATE] == 1
    if dtype == torch.float32:
        assert relative_error(done.got, done.want) < 1e-6
    else:
        # rows are rounded before they are normalised, by both: at most a neighbour where a sum came out differently
        assert (done.got == done.want).float().mean() > 0.98
        assert relative_error(done.got, done.want) < 2**-7


@pytest.mark.parametrize("norm", [centred, eps_outside, summed], ids=lambda f: f.__name__)
def test_another_norm_stays_behind(norm, rewritten):
    done, taken = with_norm(rewritten, norm)
    assert not taken
    assert done.fused[UPDATE] == 1
    assert relative_error(done.got, done.want) < 1e-6


def test_a_norm_that_rounds_elsewhere_stays_behind(rewritten):
    assert with_norm(rewritten, weight_after_the_cast)[1]  # float32 has nothing to round
    done, taken = with_norm(rewritten, weight_after_the_cast, torch.bfloat16)
    assert not taken
    assert (done.got == done.want).float().mean() > 0.98


def test_rows_that_somebody_else_reads_stay(rewritten):
    def program(bank, running, query, weight):
        h = mixed(bank, running, query, torch.float32)
        return by_hand(h, weight), h.sum(-1)

    done = run(program, *operands(), stable=False)
    (update,) = rewritten[-1].graph.find_nodes(op="call_function", target=torch.ops.k31.attn_res_update.default)
    assert update.kwargs.get("norm_weight") is None
    for got, want in zip(done.got, done.want, strict=True):
        assert relative_error(got, want) < 1e-6


def test_the_running_sum_is_still_given(rewritten):
    """Two sub-layers: the first one's add goes into its update, whose sum the second one continues."""

    def program(bank, running, query, weight):
        first = by_hand(mixed(bank, running, query, torch.float32), weight)
        running = running + first.tanh()
        second = by_hand(mixed(bank, running, query * 0.5, torch.float32), weight * 2)
        return second, running

    done = run(program, *operands(), stable=False)
    updates = rewritten[-1].graph.find_nodes(op="call_function", target=torch.ops.k31.attn_res_update.default)
    assert [update.kwargs.get("norm_weight") is not None for update in updates] == [True, True]
    assert [update.args[1] is not None for update in updates] == [False, True]
    for got, want in zip(done.got, done.want, strict=True):
        assert relative_error(got, want) < 1e-6
