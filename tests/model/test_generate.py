"""Greedy generation: equal to the plain loop, for ragged prompts, with end tokens and callbacks."""

import pytest
import torch

from k31compile.model import Caches, CapacityError, K31ForCausalLM, ModelError, generate

PROMPTS = [[5, 9, 2], [7] * 40, [1], list(range(20))]


@pytest.fixture
def model(odd):
    return K31ForCausalLM(odd).double()


def plain_loop(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        caches = Caches.allocate(model.config, 1, 60, dtype=torch.float64)
        tokens.append(model(torch.tensor([tokens]), caches, torch.tensor([0]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("chunk", [16, 64])
def test_equals_recomputing_everything(model, chunk):
    expected = [plain_loop(model, prompt, 6) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 6, chunk=chunk) == expected
    assert len({tuple(row) for row in expected}) == len(PROMPTS)


def test_every_prefill_call_has_one_shape(model, odd):
    shapes = []

    def spy(tokens, caches, start, lengths=None):
        shapes.append((tuple(tokens.shape), lengths is None))
        return model(tokens, caches, start, lengths)

    caches = Caches.allocate(odd, 4, 60, dtype=torch.float64)
    assert generate(spy, PROMPTS, 4, chunk=16, caches=caches) == generate(model, PROMPTS, 4)
    assert shapes == [((4, 16), False)] * 3 + [((4, 1), True)] * 3


def test_stops_each_request_at_the_end_token(model):
    free = generate(model, PROMPTS, 8)
    end = free[1][2]
    seen = []
    stopped = generate(model, PROMPTS, 8, eos_token_id=end, on_token=lambda r, t: seen.append((r, t)))
    for row, tokens in enumerate(free):
        cut = tokens.index(end) + 1 if end in tokens else len(tokens)
        assert stopped[row] == tokens[:cut]
        assert [t for r, t in seen if r == row] == tokens[:cut]


def test_given_caches_are_reset_and_a_tensor_will_do(model, odd):
    caches = Caches.allocate(odd, 2, 30, dtype=torch.float64)
    prompts = torch.tensor([[3, 1, 4], [1, 5, 9]])
    first = generate(model, prompts, 5, caches=caches)
    assert generate(model, prompts, 5, caches=caches) == first
    assert generate(model, prompts[0], 5) == first[:1]
    assert generate(model, prompts, 0) == [[], []]


def test_refusals(model, odd):
    with pytest.raises(ModelError, match="prompt 1 is empty"):
        generate(model, [[1], []], 3)
    with pytest.raises(ModelError, match="no prompt"):
        generate(model, [], 3)
    with pytest.raises(ModelError, match=r"2 prompts for caches of 1"):
        generate(model, [[1], [2]], 3, caches=Caches.allocate(odd, 1, 30))
    with pytest.raises(CapacityError, match="max_tokens=103"):
        generate(model, [[1] * 3], 100, caches=Caches.allocate(odd, 1, 30, dtype=torch.float64))
    with pytest.raises(ModelError, match=r"config="):
        generate(lambda *args: None, [[1]], 3)
