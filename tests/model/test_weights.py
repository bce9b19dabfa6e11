"""Weights on disk: round trips, shards, and every kind of bad file named with nothing loaded."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from k31compile.model import K31ForCausalLM, WeightsError, load_model, load_weights, save_weights

INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"


@pytest.fixture
def saved(tmp_path, odd):
    model = K31ForCausalLM(odd, seed=1)
    save_weights(model, tmp_path, max_shard_bytes=60_000)
    return model, tmp_path


def shard_of(folder, name):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_round_trip_in_several_shards(saved, odd):
    model, folder = saved
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert all(path.stat().st_size < 70_000 for path in shards if len(load_file(path)) > 1)
    other = K31ForCausalLM(odd, seed=2)
    assert not same(model, other)
    load_weights(other, folder)
    assert same(model, other)
    assert same(load_model(folder), model)
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.state_dict().values())


def test_saving_again_leaves_only_named_files(saved):
    model, folder = saved
    save_weights(model, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model-00001-of-00001.safetensors", INDEX]
    assert same(load_model(folder), model)


def test_a_single_file_without_index_loads(tmp_path, odd):
    model, other = K31ForCausalLM(odd, seed=1), K31ForCausalLM(odd, seed=2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    load_weights(other, tmp_path)
    assert same(model, other)


def test_serving_dtype_round_trip(tmp_path, odd):
    model = K31ForCausalLM(odd, seed=1).to_serving_dtype(torch.bfloat16)
    save_weights(model, tmp_path)
    again = load_model(tmp_path, torch.bfloat16)
    assert same(model, again)
    assert again.lm_head.weight.dtype == torch.bfloat16
    assert again.model.layers[0].self_attn.A_log.dtype == torch.float32


def drop(folder):
    edit(shard_of(folder, HEAD), lambda t: t.pop(HEAD))


def add(folder):
    edit(shard_of(folder, HEAD), lambda t: t.update(stray=torch.zeros(2)))


def reshape(folder):
    edit(shard_of(folder, HEAD), lambda t: t.update({HEAD: t[HEAD].T.contiguous()}))


def retype(folder):
    edit(shard_of(folder, HEAD), lambda t: t.update({HEAD: t[HEAD].int()}))


def truncate(folder):
    path = shard_of(folder, HEAD)
    path.write_bytes(path.read_bytes()[:-5])


def flip(folder):
    path = shard_of(folder, HEAD)
    edit(path, lambda t: t[HEAD][3, 5].neg_())


def garble_hashes(folder):
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["sha256"] = "none"
    (folder / INDEX).write_text(json.dumps(index))


def empty(folder):
    shard_of(folder, HEAD).write_bytes(b"")


def foreign(folder):
    shard_of(folder, HEAD).write_bytes(b"PK\x03\x04 this is a zip file, or says so")


def remove(folder):
    shard_of(folder, HEAD).unlink()


def unname(folder):
    edit_index(folder, lambda m: m.pop(HEAD))


def name_unknown(folder):
    path = shard_of(folder, HEAD)
    edit(path, lambda t: t.update(stray=torch.zeros(2)))
    edit_index(folder, lambda m: m.update(stray=path.name))


def escape(folder):
    edit_index(folder, lambda m: m.update({HEAD: "../model-00001-of-00001.safetensors"}))


def break_index(folder):
    (folder / INDEX).write_text("{")


def empty_index(folder):
    (folder / INDEX).write_text("{}")


def remove_index(folder):
    (folder / INDEX).unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (drop, rf"{HEAD}: the index says model-\d+-of-\d+\.safetensors, which does not hold it"),
        (add, r"stray in model-\d+-of-\d+\.safetensors: not in the index"),
        (reshape, rf"{HEAD} in model-\S+: shape \[52, 101\], the model has \[101, 52\]"),
        (retype, rf"{HEAD} in model-\S+: dtype I32"),
        (flip, rf"{HEAD} in model-\S+: its bytes are not those whose hash the index holds"),
        (garble_hashes, r"index\.json: metadata\.sha256 is no map"),
        (truncate, r"model-\d+-of-\d+\.safetensors: truncated or no safetensors file"),
        (empty, r"model-\d+-of-\d+\.safetensors: truncated or no safetensors file"),
        (foreign, r"model-\d+-of-\d+\.safetensors: truncated or no safetensors file"),
        (remove, r"model-\d+-of-\d+\.safetensors: the index names it, but it does not exist"),
        (unname, rf"{HEAD}: the model needs it"),
        (name_unknown, r"stray: \S+ has it, the model does not"),
        (escape, r"no file of this folder"),
        (break_index, r"index\.json cannot be read as JSON"),
        (empty_index, r"index\.json has no weight_map"),
        (remove_index, r"index\.json does not exist"),
    ],
)
def test_damage_is_named_and_nothing_is_loaded(saved, odd, damage, named):
    _, folder = saved
    damage(folder)
    model, untouched = K31ForCausalLM(odd, seed=2), K31ForCausalLM(odd, seed=2)
    with pytest.raises(WeightsError, match=named):
        load_weights(model, folder)
    assert same(model, untouched)


def test_an_index_without_hashes_loads(saved):
    model, folder = saved
    index = json.loads((folder / INDEX).read_text())
    del index["metadata"]["sha256"]
    (folder / INDEX).write_text(json.dumps(index))
    assert same(load_model(folder), model)


def test_many_problems_come_in_one_message(saved, odd):
    with pytest.raises(WeightsError, match=r"nothing was loaded[\s\S]*and \d+ more"):
        load_weights(K31ForCausalLM(odd.replace(hidden_size=54)), saved[1])


def test_a_meta_model_neither_saves_nor_loads(saved, tmp_path, odd):
    with torch.device("meta"):
        model = K31ForCausalLM(odd)
    with pytest.raises(WeightsError, match="meta device"):
        save_weights(model, tmp_path / "other")
    with pytest.raises(WeightsError, match="meta device"):
        load_weights(model, saved[1])
