"""What is almost the operator is left alone, with the reason; what is something else is not even mentioned."""

import pytest
import torch
from near_misses import ATTENTIONS, INDEXERS, OTHER_LENGTHS, STRANGERS, gathered, mix
from running import run
from torch.testing import assert_close


def rows(b=2, t=11, s=36, h=3, d=10, start=(17, 25)):
    generator = torch.Generator().manual_seed(4)
    q, k, w = (torch.randn(shape, generator=generator) for shape in ((b, t, h, d), (b, s, d), (b, t, h)))
    return q, k, w, torch.tensor(start)[:, None] + torch.arange(t)


def with_attention(start=(17, 25)):
    generator = torch.Generator().manual_seed(6)
    q, c = torch.randn(2, 11, 3, 14, generator=generator), torch.randn(2, 36, 14, generator=generator)
    return *rows(start=start), q, c


def hold(result, name, words):
    assert name not in result.fused
    reasons = [refusal.reason for refusal in result.refused if refusal.name == name]
    assert reasons, "refused without a word"
    for word in words:
        assert any(word in reason for reason in reasons), reasons
    assert all(refusal.where and refusal.hint for refusal in result.refused)
    assert_close(result.got, result.want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", INDEXERS)
def test_near_indexer(name):
    fn, words = INDEXERS[name]
    hold(run(fn, *rows(), stable=False), "lightning_indexer", words)


SILENT = {
    "softmax_over_all_keys": "no index above the softmax, so no anchor and no reason",
}


def expected(names, known):
    return [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=known[name])) if name in known else name
        for name in names
    ]


@pytest.mark.parametrize("name", expected(ATTENTIONS, SILENT))
def test_near_attention(name):
    fn, words = ATTENTIONS[name]
    hold(run(fn, *with_attention()), "sparse_flash_attention", words)


@pytest.mark.parametrize(("keys", "chosen", "used"), [(43, 43, 13), (301, 60, 13), (44, 12, 11)])
def test_a_longer_list_of_which_a_part_is_used(keys, chosen, used):
    """Confirmed at smaller sizes, the part must not become the whole."""
    generator = torch.Generator().manual_seed(8)
    q, c = torch.randn(2, 3, 4, 9, generator=generator), torch.randn(2, keys, 9, generator=generator)
    listed = torch.rand(2, 3, keys, generator=generator).argsort(-1)[..., :chosen].contiguous()

    def attend(q, c, listed):
        unchosen = torch.ones(2, 3, keys, dtype=torch.bool).scatter(-1, listed[..., :used], False)
        logits = torch.einsum("bthd,bsd->bths", q, c).masked_fill(unchosen.unsqueeze(2), -torch.inf)
        return torch.einsum("bths,bsd->bthd", logits.softmax(-1), c)

    assert_close(run(attend, q, c, listed).got, attend(q, c, listed), rtol=0, atol=1e-5)


def test_short_history_reads_no_future():
    name = "gather_without_mask"
    fn, words = ATTENTIONS[name]
    result = run(fn, *with_attention(start=(0, 1)))
    hold(result, "sparse_flash_attention", words)


@pytest.mark.parametrize("start", [(0, 1), (17, 25)])
@pytest.mark.parametrize("name", OTHER_LENGTHS)
def test_other_lengths_are_honoured(name, start):
    fn, names = OTHER_LENGTHS[name]
    result = run(fn, *(with_attention(start) if len(names) > 1 else rows(start=start)))
    assert set(names) <= set(result.fused), result.reasons
    assert_close(result.got, result.want, rtol=0, atol=1e-5)


ROUTERS = ("moe_gate", "grouped_gate")
"""Strangers to the indexer that another recogniser knows."""
MENTIONED = {"token_merge": "a top-k over a similarity of tokens is told as a missed indexer"}


@pytest.mark.parametrize("name", expected(STRANGERS, MENTIONED))
def test_strangers_are_not_mentioned(name):
    generator = torch.Generator().manual_seed(8)
    x, bias = torch.randn(2, 7, 12, generator=generator), torch.randn(6, generator=generator)
    router = torch.nn.Parameter(torch.randn(6, 12, generator=generator), requires_grad=False)
    experts = torch.nn.Parameter(torch.randn(6, 12, 5, generator=generator), requires_grad=False)
    result = run(STRANGERS[name][0], x, router, experts, bias, stable=False)
    assert result.fused == ({"moe_gating_top_k": 1} if name in ROUTERS else {})
    assert not result.refused, result.reasons
    assert not [note for note in result.notes if "undone" in note]
    assert_close(result.got, result.want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("batch", "slot"), [(1, 0), (1, 4), (2, 4)])
def test_a_slot_of_one_token_that_is_left_out(batch, slot):
    """Of one token a sample has few rows: in none of them may this slot hold a key that is seen."""
    generator = torch.Generator().manual_seed(9)
    q, r = torch.randn(batch, 1, 8, 14, generator=generator), torch.randn(batch, 1, 8, 6, generator=generator)
    c, kr = torch.randn(batch, 36, 14, generator=generator), torch.randn(batch, 36, 6, generator=generator)
    listed = torch.rand(batch, 1, 36, generator=generator).argsort(-1)[..., :5].contiguous()

    def attend(q, r, c, kr, listed, pos):
        chosen = torch.cat([listed[..., :slot], listed[..., slot + 1 :]], -1)
        hide = (chosen > pos.unsqueeze(-1)) | (chosen < 0)
        safe = chosen.clamp(min=0)
        rows, turned = gathered(c, safe), gathered(kr, safe)
        logits = 0.3 * (torch.einsum("bthd,btkd->bthk", q, rows) + torch.einsum("bthd,btkd->bthk", r, turned))
        return mix(logits.masked_fill(hide.unsqueeze(2), -torch.inf).softmax(-1), rows)

    pos = torch.full((batch, 1), 35)
    assert_close(run(attend, q, r, c, kr, listed, pos).got, attend(q, r, c, kr, listed, pos), rtol=0, atol=1e-5)


def test_positions_that_look_like_a_block_table_undo_nothing():
    """A reading of the operands that the operator refuses is no reading, and no reason to leave the graph alone."""
    generator = torch.Generator().manual_seed(3)
    q, c = torch.randn(2, 1, 8, 14, generator=generator), torch.randn(2, 36, 14, generator=generator)
    listed = torch.rand(2, 1, 36, generator=generator).argsort(-1)[..., :5].contiguous()

    def attend(q, c, listed, pos):
        rows = gathered(c, listed.clamp(min=0))
        logits = torch.einsum("bthd,btkd->bthk", q, rows) * 0.3
        hide = (listed > pos.unsqueeze(-1)) | (listed < 0)
        return mix(logits.masked_fill(hide.unsqueeze(2), -torch.inf).softmax(-1), rows)

    result = run(attend, q, c, listed, torch.tensor([[20], [30]]))
    assert result.fused == {"sparse_flash_attention": 1}
    assert not [note for note in result.notes if "undone" in note]
    assert_close(result.got, result.want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("pos", [3, 34])
def test_where_the_keys_of_one_token_end(pos, more):
    """A single position must be neither first nor last in all samples: one key more or less would not show."""
    generator = torch.Generator().manual_seed(3)
    q, c = torch.randn(1, 1, 8, 14, generator=generator), torch.randn(1, 36, 14, generator=generator)
    listed = (pos + torch.tensor([[[0, 1, 2, -2, -1]]])) % 36

    def attend(q, c, listed, pos):
        rows = gathered(c, listed.clamp(min=0))
        logits = torch.einsum("bthd,btkd->bthk", q, rows) * 0.3
        hide = (listed > pos.unsqueeze(-1) + more) | (listed < 0)
        return mix(logits.masked_fill(hide.unsqueeze(2), -1e30).softmax(-1), rows)

    result = run(attend, q, c, listed, torch.tensor([[pos]]))
    assert result.fused == {"sparse_flash_attention": 1}
    assert_close(result.got, result.want, rtol=0, atol=1e-5)
