"""The whole model: however a sequence is cut, padded or batched, the logits are the same."""

import pytest
import torch

from k31compile.model import Caches, K31Config, K31ForCausalLM, MlaCache, prefill

LENGTHS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49, 64, 65, 97)


def gold(config, seed=0):
    return K31ForCausalLM(config, seed).double()


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pieces", [[1] * 70, [64, 6], [6, 64], [1, 8, 9, 16, 2, 33, 1]], ids=str)
@pytest.mark.parametrize("name", ["tiny", "odd"])
def test_any_split_gives_the_logits_of_one_prefill(name, pieces, odd, run, tokens):
    config = odd if name == "odd" else K31Config.tiny()
    model, sequence = gold(config), tokens(2, 70)
    whole = run(model, sequence)
    assert whole.dtype == torch.float64
    close(run(model, sequence, pieces), whole)
    assert whole.std() > 0.1


def test_float32_agrees_with_float64(odd, run, tokens):
    model, sequence = K31ForCausalLM(odd), tokens(2, 70)
    single = run(model, sequence)
    steps = run(model, sequence, [1] * 70)
    assert single.dtype == torch.float32
    double = run(model.double(), sequence)
    close(single.double(), double, 2e-4)
    close(steps.double(), double, 2e-4)


def test_serving_dtype_stays_near_float64(run, tokens):
    sequence = tokens(2, 40)
    # Every expert and every key is chosen, or a near tie that falls the other way would hide the rounding.
    config = K31Config.tiny().replace(num_experts_per_token=8, index_topk=500)
    model = K31ForCausalLM(config).to_serving_dtype(torch.bfloat16)
    served = run(model, sequence, [33, 1, 6])
    assert served.dtype == torch.float32
    exact = run(model.double(), sequence)
    error = (served - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.03


VARIANTS = {
    "rope": {"index_rope_dim": 6},
    "rope interleaved": {"index_rope_dim": 6, "index_rope_interleave": True},
    "hadamard": {"index_hadamard": True},
    "shared indexer": {"indexer_types": ("full", "shared")},
    "native": {"mla_form": "native"},
    "stream residuals": {"attn_res_dtype": "stream"},
    "softplus gate": {"gate_lower_bound": None},
    "groups": {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "dense experts": {"moe_form": "dense"},
    "mla first": {"full_attention_layers": (1, 2)},
    "kda only": {"full_attention_layers": ()},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_switch_survives_a_split(changes, odd, run, tokens):
    model, sequence = gold(odd.replace(**changes)), tokens(2, 50)
    close(run(model, sequence, [20, 1, 1, 9, 19]), run(model, sequence))


def test_which_switches_change_the_result(odd, run, tokens):
    model, sequence = gold(odd), tokens(2, 50)
    expected = run(model, sequence)
    for name, changes in VARIANTS.items():
        other = gold(odd.replace(**changes))
        if other.state_dict().keys() != model.state_dict().keys():
            continue
        same = name in {"hadamard", "native", "stream residuals", "dense experts"}
        difference = (run(other, sequence) - expected).abs().max()
        assert (difference < 1e-10) == same, name


def test_shared_indexer_owns_no_indexer_and_no_keys(odd):
    model = gold(odd.replace(indexer_types=("full", "shared")))
    caches = Caches.allocate(model.config, 1, 9)
    assert model.model.layers[3].self_attn.indexer is not None
    assert model.model.layers[4].self_attn.indexer is None
    assert caches.layers[3].index_keys is not None
    assert caches.layers[4].index_keys is None


@pytest.mark.parametrize("length", LENGTHS)
def test_padded_chunk_prefill_then_decode(length, odd, run, tokens):
    model, sequence = gold(odd), tokens(1, length + 2)
    whole = run(model, sequence, capacity=120)
    caches = Caches.allocate(odd, 1, 120, dtype=torch.float64)
    last = prefill(model, caches, sequence[:, :length].tolist(), chunk=16)
    close(last, whole[:, length - 1])
    close(run_more(model, caches, sequence, length), whole[:, length:])


def run_more(model, caches, sequence, start):
    steps = [model(sequence[:, t : t + 1], caches, torch.tensor([t])) for t in range(start, sequence.shape[1])]
    return torch.cat(steps, 1)


def test_ragged_batch_equals_each_request_alone(odd, run, tokens):
    model, sequence, lengths = gold(odd), tokens(4, 50), [50, 3, 0, 29]
    caches = Caches.allocate(odd, 4, 60, dtype=torch.float64)
    # Pages in any order: nothing may rely on a request's pages being neighbours.
    caches.block_table.copy_(caches.block_table.flatten().flip(0).view_as(caches.block_table))
    batch = model(sequence, caches, torch.zeros(4, dtype=torch.int64), torch.tensor(lengths))
    assert torch.isfinite(batch).all()
    step = model(sequence[:, :1], caches, torch.tensor(lengths, dtype=torch.int32), torch.tensor([1, 1, 0, 1]))
    for row, length in enumerate(lengths):
        alone = run(model, torch.cat([sequence[row : row + 1, :length], sequence[row : row + 1, :1]], 1), capacity=60)
        close(batch[row : row + 1, :length], alone[:, :length])
        if length:
            close(step[row], alone[0, -1:])
    for cache in caches.layers:
        if not isinstance(cache, MlaCache):
            assert (cache.state[3] == 0).all()
            assert (cache.conv[3] == 0).all()


def test_an_inactive_request_touches_only_null_rows(odd, tokens):
    model, caches = gold(odd), Caches.allocate(odd, 2, 30, dtype=torch.float64)
    own = [page.item() for page in caches.block_table[1]]
    caches.block_table[1], caches.state_rows[1] = 0, 0
    logits = model(tokens(2, 20), caches, torch.zeros(2, dtype=torch.int64), torch.tensor([20, 0]))
    assert torch.isfinite(logits).all()
    for cache in caches.layers:
        if isinstance(cache, MlaCache):
            assert all((pages[own] == 0).all() for pages in cache)
        else:
            assert (cache.state[2] == 0).all()
            assert (cache.conv[2] == 0).all()


@pytest.mark.parametrize("form", ["absorbed", "native"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_garbage_beyond_the_length_is_never_read(form, garbage, odd, tokens):
    config = odd.replace(mla_form=form)
    model, sequence = gold(config), tokens(2, 31)
    results = []
    for fill in (0.0, garbage):
        caches = Caches.allocate(config, 2, 60, dtype=torch.float64)
        for cache in caches.layers:
            for pages in cache:
                (pages if isinstance(cache, MlaCache) else pages[0]).fill_(fill)
        first = model(sequence[:, :30], caches, torch.tensor([0, 0]), torch.tensor([30, 11]))
        second = model(sequence[:, 30:], caches, torch.tensor([30, 11]))
        results.append(torch.cat([first, second], 1))
    assert torch.isfinite(results[1]).all()
    assert torch.equal(*results)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
def test_sparse_equals_dense_while_all_visible_keys_fit(length, run, tokens):
    sparse, sequence = K31Config.tiny(), tokens(2, length, vocab=256)
    assert sparse.index_topk == 16
    few, all_keys = (run(gold(c), sequence) for c in (sparse, sparse.replace(index_topk=500)))
    close(few[:, :16], all_keys[:, :16])
    if length > 16:
        assert ((few - all_keys)[:, 16:].abs().amax(-1) > 1e-9).all()


def test_reset_makes_the_caches_as_new(odd, run, tokens):
    model, sequence = gold(odd), tokens(2, 30)
    caches = Caches.allocate(odd, 2, 40, dtype=torch.float64)
    addresses = [t.data_ptr() for cache in caches.layers for t in cache]
    first = run(model, sequence, caches=caches)
    dirty = run(model, sequence, caches=caches)
    assert (dirty - first).abs().max() > 1e-3
    caches.reset()
    assert torch.equal(run(model, sequence, caches=caches), first)
    caches.reset(request=1)
    half = run(model, sequence, caches=caches)
    close(half[1], first[1])
    assert (half[0] - first[0]).abs().max() > 1e-3
    assert addresses == [t.data_ptr() for cache in caches.layers for t in cache]


def test_state_pools_are_value_major_and_float32(odd):
    caches = Caches.allocate(odd, 2, 40, dtype=torch.bfloat16)
    assert caches.layers[0].state.shape == (3, 3, 14, 10)
    assert caches.layers[0].state.dtype == torch.float32
    assert caches.layers[0].conv.shape == (3, 3, 3 * (10 + 10 + 14))
    assert caches.layers[3].latent.shape == (11, 9, 1, 26)
    assert caches.layers[3].rope.shape == (11, 9, 1, 8)
    assert caches.layers[3].index_keys.shape == (11, 9, 1, 16)
    assert caches.layers[3].latent.dtype == torch.bfloat16


def test_gradients_reach_everything_but_the_selection(odd, tokens):
    model, sequence = gold(odd), tokens(2, 30)
    with torch.enable_grad():
        caches = Caches.allocate(odd, 2, 30, dtype=torch.float64)
        logits = model(sequence, caches, torch.zeros(2, dtype=torch.int64))
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), sequence[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        if ".indexer." in name or name.endswith("e_score_correction_bias"):
            assert parameter.grad is None or (parameter.grad == 0).all(), name
        elif name == "model.layers.0.attn_res.proj.weight" or name == "model.layers.0.attn_res.norm.weight":
            assert parameter.grad is None, name
        else:
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.abs().max() > 0, name
