"""Configurations: what is refused, the published counts, the meta device, config.json, the link guard."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import k31compile.model
from k31compile.model import (
    CONFIGS,
    Caches,
    CapacityError,
    ConfigError,
    K31Config,
    K31ForCausalLM,
    count_parameters,
    load_config,
    save_config,
)

BAD = [
    ("hidden_size", 0), ("index_topk", -1), ("rms_norm_eps", 0.0), ("mla_form", "flash"), ("moe_form", "sorted"),
    ("attn_res_dtype", "bfloat16"), ("full_attention_layers", (4, 4)), ("full_attention_layers", (0, 5)),
    ("full_attention_layers", (4, 6)), ("gate_lower_bound", 0.0), ("first_k_dense_replace", 6), ("kda_pairwise", ""),
    ("num_expert_group", 3), ("num_expert_group", 8), ("topk_group", 2), ("num_experts_per_token", 9),
    ("num_shared_experts", -1), ("situ_linear_beta", 0.0), ("index_rope_dim", 7), ("index_rope_dim", 66),
    ("indexer_types", ("full",)), ("indexer_types", ("shared", "full")), ("indexer_types", ("full", "half")),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_field_is_named_with_value_and_remedy(field, value):
    with pytest.raises(ConfigError, match=rf"K31Config\.{field} = .*: must be ") as error:
        K31Config(**{field: value})
    assert repr(value) in str(error.value)


def test_hadamard_needs_a_power_of_two():
    with pytest.raises(ConfigError, match="index_head_dim"):
        K31Config(index_head_dim=48, index_hadamard=True)


def test_configurations_are_frozen_and_comparable():
    with pytest.raises(AttributeError):
        K31Config.tiny().hidden_size = 3
    assert K31Config.tiny() == K31Config.tiny().replace(vocab_size=256) != K31Config.tiny().replace(vocab_size=7)


def sizes(name):
    with torch.device("meta"):
        model = K31ForCausalLM(CONFIGS[name]())
    indexers = sum(p.numel() for n, p in model.named_parameters() if ".indexer." in n)
    return count_parameters(model), indexers


def test_parameter_counts_are_those_of_the_specification():
    full, indexers = sizes("full")
    assert full - indexers == 2_779_484_476_000
    assert indexers == 24 * 13_959_424
    assert sizes("mini")[0] == 78_295_280
    assert sizes("tiny")[0] == 371_228


def test_full_decodes_on_the_meta_device():
    config = K31Config.full()
    assert [layer + 1 for layer in range(93) if config.is_mla(layer)] == [*range(4, 93, 4), 93]
    with torch.device("meta"):
        model = K31ForCausalLM(config).to_serving_dtype(torch.bfloat16)
        caches = Caches.allocate(config, 2, 4096, dtype=torch.bfloat16, device="meta")
        logits = model(torch.zeros(2, 1, dtype=torch.int64), caches, torch.zeros(2, dtype=torch.int64))
    assert logits.shape == (2, 1, 163840)
    assert caches.layers[0].state.shape == (3, 96, 128, 128)
    assert caches.layers[3].latent.shape == (65, 128, 1, 512)


def test_config_file_round_trip(tmp_path, odd):
    config = odd.replace(indexer_types=("full", "shared"), situ_linear_beta=None, gate_lower_bound=None)
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.pop("hidden_size"), "missing fields: hidden_size"),
        (lambda c: c.update(hiden_size=3), "unknown fields: hiden_size"),
        (lambda c: c.update(hidden_size="64"), "hidden_size = '64'"),
        (lambda c: c.update(hidden_size=64.0), "hidden_size = 64.0"),
        (lambda c: c.update(latent_moe_use_norm=1), "latent_moe_use_norm = 1"),
        (lambda c: c.update(index_topk=0), "index_topk = 0"),
        (lambda c: c.update(model_type="kimi"), "model_type"),
    ],
)
def test_a_bad_config_file_is_named(tmp_path, change, named):
    save_config(K31Config.tiny(), tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=named):
        load_config(tmp_path)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_an_unreadable_config_file_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_the_link_is_no_second_package():
    spec = importlib.util.spec_from_file_location("model", Path(k31compile.model.__file__))
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=r"import k31compile\.model instead of model"):
        spec.loader.exec_module(module)


def test_caches_refuse_what_cannot_be():
    config = K31Config.tiny()
    with pytest.raises(ConfigError, match="batch_size=0"):
        Caches.allocate(config, 0, 5)
    caches = Caches.allocate(config, 2, 17)
    assert caches.capacity == 32
    caches.check_room(32)
    with pytest.raises(CapacityError, match=r"32 tokens per request, 33 are needed"):
        caches.check_room(33)


def test_init_depends_on_the_seed_only():
    first, again = (K31ForCausalLM(K31Config.tiny(), seed=3).state_dict() for _ in range(2))
    other = K31ForCausalLM(K31Config.tiny(), seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_serving_dtype_keeps_what_a_checkpoint_keeps_in_float32():
    model = K31ForCausalLM(K31Config.tiny()).to_serving_dtype(torch.bfloat16)
    kept = {name.split(".", 3)[-1] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {
        "self_attn.conv.weight", "self_attn.A_log", "self_attn.dt_bias", "self_attn.o_norm.weight",
        "mlp.gate.weight", "mlp.gate.e_score_correction_bias", "self_attn.indexer.k_norm.weight",
        "self_attn.indexer.k_norm.bias",
    }  # fmt: skip
    assert {p.dtype for p in model.to_serving_dtype(torch.float64).parameters()} == {torch.float64}
