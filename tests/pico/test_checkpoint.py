"""The shipped checkpoint: its form, what it can do, and damage to it that the command line must name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pico_training import card
from pico_training.evaluation import bits_per_byte, measure_recall
from pico_training.recipe import CONFIG, for_training
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from k31compile.cli import entries
from k31compile.errors import CheckpointError
from k31compile.model import (
    K31Config,
    K31ForCausalLM,
    count_parameters,
    load_config,
    load_model,
    load_weights,
    save_weights,
)

BITS_ON_THE_SAMPLE = 1.536
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def trained(pico_folder: Path) -> K31ForCausalLM:
    """The checkpoint in the forms that can be watched, in float32."""
    model = K31ForCausalLM(for_training(load_config(pico_folder)))
    load_weights(model, pico_folder)
    return model.eval()


def test_it_is_a_small_k31_with_everything_in_it(pico_folder: Path) -> None:
    config = load_config(pico_folder)
    assert config == CONFIG
    assert count_parameters(K31ForCausalLM(config)) <= 3e6
    assert config.num_hidden_layers == 6
    assert 0 < len(config.full_attention_layers) < 6
    assert config.num_hidden_layers / config.attn_res_block_size == 3
    assert config.routed_expert_hidden_size < config.hidden_size
    assert config.index_topk <= 64


def test_files_are_sharded_small_and_in_the_dtypes_of_serving(pico_folder: Path) -> None:
    shards = sorted(pico_folder.glob("*.safetensors"))
    assert len(shards) > 1
    assert sum(path.stat().st_size for path in shards) <= 8e6
    expected = K31ForCausalLM(CONFIG).to_serving_dtype(torch.bfloat16).state_dict()
    held = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert {name: (t.dtype, t.shape) for name, t in held.items()} == {
        n: (t.dtype, t.shape) for n, t in expected.items()
    }
    assert all(torch.isfinite(tensor).all() for tensor in held.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_per_byte_of_text_it_never_saw(pico_folder: Path, sample: torch.Tensor, dtype: torch.dtype) -> None:
    model = load_model(pico_folder, dtype).eval()
    bits = bits_per_byte(model, sample)
    assert bits == pytest.approx(BITS_ON_THE_SAMPLE, abs=TOLERANCE)


@pytest.mark.slow
def test_the_selection_matters(trained: K31ForCausalLM, sample: torch.Tensor) -> None:
    """What makes this checkpoint fit to test sparse attention: a wrong selection costs far more than the tolerance."""
    bits = {name: bits_per_byte(trained, sample, name) for name in ("indexer", "dense", "random", "last window")}
    assert bits["indexer"] == pytest.approx(bits["dense"], abs=0.02)
    assert bits["random"] > bits["indexer"] + 0.2
    assert bits["last window"] > bits["indexer"] + 0.2


def test_the_indexer_finds_most_of_the_attention(trained: K31ForCausalLM, sample: torch.Tensor) -> None:
    for recall in measure_recall(trained, sample):
        assert recall.indexer > 0.8 * recall.oracle
        assert recall.indexer > 2 * max(recall.random, recall.window)


def test_the_card_says_what_was_measured(pico_folder: Path) -> None:
    training = json.loads((pico_folder / card.TRAINING).read_text())
    measured = json.loads((pico_folder / card.MEASUREMENTS).read_text())
    assert (pico_folder / card.CARD).read_text() == card.card_text(pico_folder, training, measured)
    assert len(training["losses"]["bits_per_byte"]) == training["recipe"]["steps"] + training["recipe"]["indexer_steps"]
    bits = measured["bits_per_byte"]
    assert bits["indexer"] <= 1.85
    assert bits["random"] - bits["indexer"] >= 0.05
    assert (pico_folder / card.CURVE).read_text().lstrip().startswith("<?xml")


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def flip(folder: Path) -> None:
    """One bit of one number, which no header knows of."""
    path = shard_of(folder, "lm_head.weight")
    content = bytearray(path.read_bytes())
    with safe_open(path, "pt") as opened:
        (raw,) = opened.get_tensor("lm_head.weight")[3, 5].view(1).view(torch.uint8).unsqueeze(0)
    at = bytes(content).find(bytes(load_file(path)["lm_head.weight"][3].view(torch.uint8).tolist()))
    assert at > 0
    assert content[at + 10] == raw[0]
    content[at + 10] ^= 1
    path.write_bytes(bytes(content))


def truncate(folder: Path) -> None:
    path = shard_of(folder, "lm_head.weight")
    path.write_bytes(path.read_bytes()[:-1])


def make_foreign(folder: Path) -> None:
    """Weights of another model under the same names."""
    config = CONFIG.replace(kda_value_dim=16)
    save_weights(K31ForCausalLM(config), folder)
    (folder / "config.json").write_bytes((entries.PICO / "config.json").read_bytes())


def rename(folder: Path) -> None:
    path = shard_of(folder, "lm_head.weight")
    tensors = load_file(path)
    tensors["head.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, path)


def unfit(folder: Path) -> None:
    """A config that the weights are not of."""
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"kda_num_heads": 4', '"kda_num_heads": 2'))


def garble(folder: Path) -> None:
    (folder / "config.json").write_text("{]")


DAMAGES = [
    (flip, "lm_head.weight in model-0000"),
    (truncate, ".safetensors: truncated or no safetensors file"),
    (make_foreign, "layers.0.self_attn.qkv_proj.weight in model-00001"),
    (rename, "lm_head.weight: the index says model-0000"),
    (unfit, "layers.0.self_attn.A_log in model-0000"),
    (garble, "config.json cannot be read as JSON"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_damage_is_one_line_that_names_file_and_tensor(
    pico_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    named: str,
) -> None:
    copy = tmp_path / "pico"
    shutil.copytree(pico_folder, copy)
    damage(copy)
    monkeypatch.setattr(entries, "PICO", copy)
    with pytest.raises(CheckpointError) as error:
        entries.build_model("pico")
    text = str(error.value)
    assert text.startswith("K31-0106: pico cannot be loaded: ")
    assert named in text
    assert "git checkout examples/pico" in text
    assert len(text.splitlines()) == 1


def test_a_checkpoint_that_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "PICO", tmp_path)
    with pytest.raises(CheckpointError, match=r"K31-0106: pico is not here .*; it is in the source tree only"):
        entries.build_model("pico")


def test_nothing_of_a_damaged_checkpoint_is_loaded(pico_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "pico"
    shutil.copytree(pico_folder, copy)
    flip(copy)
    model = K31ForCausalLM(load_config(copy), seed=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(Exception, match="nothing was loaded"):
        load_weights(model, copy)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_pico_as_a_target_reads_text_and_takes_a_dtype() -> None:
    for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        prefill, decode = entries.shipped_entries("pico", dtype=dtype)
        assert isinstance(prefill.model, K31ForCausalLM)
        assert isinstance(prefill.model.config, K31Config)
        assert prefill.model.lm_head.weight.dtype == expected
        assert bytes(prefill.args[0][0].tolist()) in entries.PROMPT.encode()
        assert decode.args[0].shape == (1, 1)
