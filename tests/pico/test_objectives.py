"""Losses, optimiser and watching, each against its plain definition."""

import pytest
import torch
from pico_training.muon import Muon, orthogonalize
from pico_training.objectives import MATCH_LENGTHS, indexer_loss, lookup_loss, next_byte_loss, repetitions
from pico_training.recipe import CONFIG, build_model, for_training
from pico_training.trainer import balance, forward
from pico_training.watch import random_selection, select_all, select_window, selecting, watched

SMALL = for_training(
    CONFIG.replace(num_hidden_layers=3, full_attention_layers=(2,), num_experts=4, page_size=16, index_topk=8)
)


@pytest.fixture(autouse=True)
def _gradients() -> object:
    with torch.enable_grad():
        yield


def tokens(rows: int = 2, length: int = 40, values: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, values, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_repetitions_are_those_of_the_definition() -> None:
    text = tokens()
    found = repetitions(text)
    for row, marks in zip(text.tolist(), found, strict=True):
        for t in range(len(row)):
            expected: list[int] = []
            for length in MATCH_LENGTHS:
                if not expected and t + 1 >= length:
                    last = row[t - length + 1 : t + 1]
                    expected = [s for s in range(length, t + 1) if row[s - length : s] == last]
            assert marks[t].nonzero().flatten().tolist() == expected, (t, row[: t + 1])
    assert found.any()


def test_lookup_loss_by_hand() -> None:
    attention = torch.tensor([[[[1.0, 0.0], [0.25, 0.75]], [[1.0, 0.0], [0.5, 0.5]]]])
    repeated = torch.tensor([[[False, False], [False, True]]])
    expected = -(torch.tensor(0.75).log() + torch.tensor(0.5).log()) / 2
    torch.testing.assert_close(lookup_loss(attention, repeated, heads=2), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(lookup_loss(attention, repeated, heads=1), -torch.tensor(0.75).log(), rtol=1e-5, atol=0)
    assert lookup_loss(attention, torch.zeros_like(repeated), heads=2) == 0


def test_indexer_loss_is_the_divergence_over_the_allowed_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    allowed = torch.rand(2, 5, 7, generator=generator) < 0.6
    allowed[..., 0] = True
    attention = torch.randn(2, 3, 5, 7, generator=generator, dtype=torch.float64)
    attention = attention.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    expected = 0.0
    for b in range(2):
        for t in range(5):
            keys = allowed[b, t]
            target, predicted = attention[b, :, t, keys].mean(0), scores[b, t, keys].log_softmax(-1)
            expected += torch.nn.functional.kl_div(predicted, target, reduction="sum").item() / 10
    assert indexer_loss(scores, attention, allowed).item() == pytest.approx(expected, rel=1e-12)
    assert torch.isfinite(indexer_loss(scores * 1e6, attention, allowed))


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (3, 16, 16)])
def test_orthogonal_steps_keep_directions_and_level_sizes(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    out = orthogonalize(matrix)
    core = u.mT @ out @ v.mT
    leveled = core.diagonal(dim1=-2, dim2=-1)
    assert (core - torch.diag_embed(leveled)).abs().max() < 1e-9
    strong = values > 0.05 * values.norm(dim=-1, keepdim=True)
    assert ((leveled > 0.6) & (leveled < 1.25))[strong].all()


def test_muon_steps_as_that_of_torch_does() -> None:
    def stepped(optimizer_type: type[torch.optim.Optimizer], **settings: object) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(16, 48, generator=generator))
        optimizer = optimizer_type([weight], lr=0.02, momentum=0.95, weight_decay=0.01, **settings)
        start = weight.detach().clone()
        for _ in range(3):
            weight.grad = torch.randn(16, 48, generator=generator)
            optimizer.step()
        return weight.detach() - start

    ours, theirs = stepped(Muon), stepped(torch.optim.Muon, nesterov=True)
    assert ((ours - theirs).norm() / theirs.norm()).item() < 0.02  # theirs goes through bfloat16


def test_watching_changes_nothing_and_leaves_no_trace() -> None:
    model = build_model(SMALL, 0)
    text = tokens(values=256)
    before = forward(model, text)
    with watched(model) as seen:
        during = forward(model, text)
    assert torch.equal(before, during)
    assert torch.equal(forward(model, text), before)
    assert [item.shape for item in seen.attention] == [(2, 4, 40, 48)]
    assert [item.shape for item in seen.scores] == [(2, 40, 48)]
    assert [item.shape for item in seen.experts] == [(80, 2)] * 2
    count = len(seen.attention)
    forward(model, text)
    assert len(seen.attention) == count


def test_what_trains_the_indexer_reaches_nothing_else() -> None:
    model = build_model(SMALL, 0)
    with watched(model) as seen, selecting(model, select_all):
        logits = forward(model, tokens(values=256))
    indexer_loss(seen.scores[0], seen.attention[0], seen.allowed[0]).backward(retain_graph=True)
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == {name for name, _ in model.named_parameters() if ".indexer." in name}
    model.zero_grad()
    next_byte_loss(logits, tokens(values=256)).backward()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if ".indexer." in name)
    assert model.model.layers[1].self_attn.kv_b_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize("select", [select_window, random_selection(0)], ids=["window", "random"])
def test_selections_hold_k_visible_keys_of_every_long_row(select) -> None:
    model = build_model(SMALL, 0)
    with torch.no_grad(), watched(model) as seen, selecting(model, select):
        forward(model, tokens(values=256))
    (allowed,) = seen.allowed
    assert not allowed[:, :, 40:].any()
    assert not (allowed & torch.ones(40, 48, dtype=torch.bool).triu(1)).any()
    assert (allowed[:, 8:].sum(-1) == 8).all()
    if select is select_window:
        assert all(allowed[0, t, t - 7 : t + 1].all() for t in range(8, 40))


def test_balance_moves_bias_towards_idle_experts() -> None:
    model = build_model(SMALL, 0)
    router = model.model.layers[1].mlp.gate
    with torch.no_grad():
        balance(router, torch.tensor([[0, 1], [0, 1], [0, 2], [0, 2]]), 0.1)
    bias = router.e_score_correction_bias
    assert bias.argmax() == 3
    assert bias.argmin() == 0
    assert bias.sum().abs() < 1e-6
