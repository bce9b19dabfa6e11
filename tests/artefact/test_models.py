"""Whole models ahead of time: prefill and decode in one file, step after step."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k31compile import load
from k31compile.ahead import make_artefact
from k31compile.cli.entries import PICO, pico_is_here, shipped_entries
from k31compile.entry import Entry
from k31compile.errors import CallRefusedError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_cache():
    """The user's own folder, since the kernels are there: building them takes long."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The entries of `tiny` and their artefact."""
    entries = shipped_entries("tiny")
    file = tmp_path_factory.mktemp("tiny") / "tiny.k31"
    make_artefact(entries, file)
    return entries, file


@torch.no_grad()
def test_steps_of_tiny_are_those_of_its_graphs(tiny):
    entries, file = tiny
    artefact = load(file)
    assert artefact.entries == ["tiny:prefill", "tiny:decode"]
    # Eager itself may pick another of two equal scores; the rewritten graph run operator by operator picks the same.
    model = torch.compile(entries[0].model, backend="k31", options={"codegen": "ops"}, dynamic=False)
    tokens, caches, start, lengths = copy.deepcopy(entries[0].args)
    other = copy.deepcopy(caches)
    expected = model(tokens, caches, start, lengths)
    torch.testing.assert_close(artefact(tokens, other, start, lengths), expected, rtol=2e-4, atol=2e-4)
    position = start + lengths
    token = expected[:, int(lengths) - 1].argmax(-1)[:, None]
    for _ in range(4):
        expected = model(token, caches, position)
        torch.testing.assert_close(artefact(token, other, start=position), expected, rtol=2e-4, atol=2e-4)
        for mine, theirs in zip(other.layers, caches.layers, strict=True):
            for left, right in zip(mine, theirs, strict=True):
                assert left is None or torch.allclose(left, right, rtol=2e-4, atol=2e-4)
        token, position = expected[:, -1].argmax(-1)[:, None], position + 1


@torch.no_grad()
def test_calls_of_tiny_that_no_entry_takes_name_the_nearest(tiny):
    entries, file = tiny
    artefact = load(file)
    tokens, caches, start, lengths = copy.deepcopy(entries[0].args)
    with pytest.raises(CallRefusedError, match=r"tokens has shape \[1, 47\], allowed is \[1, 48\] \(tiny:prefill\)"):
        artefact(tokens[:, 1:].clone(), caches, start, lengths)
    with pytest.raises(CallRefusedError, match=r"lengths is None, allowed is a tensor int64 \[1\] \(tiny:prefill\)"):
        artefact(tokens, caches, start)
    with pytest.raises(CallRefusedError, match=r"start has dtype int32, allowed is int64"):
        artefact(tokens[:, :1].clone(), caches, start.int())


def test_two_makes_give_the_same_manifest_but_for_libraries(tiny, tmp_path):
    from k31compile.cache.artefact.container import open_artefact

    _, file = tiny
    again = tmp_path / "tiny.k31"
    make_artefact(shipped_entries("tiny", "decode"), again)
    first, second = open_artefact(file), open_artefact(again)
    assert first.files["1/graph.txt"] == second.files["0/graph.txt"]
    assert first.files["1/report.json"] == second.files["0/report.json"]
    data = [one.manifest["entries"][number] | {"folder": ""} for one, number in ((first, 1), (second, 0))]
    assert json.dumps(data[0], sort_keys=True) == json.dumps(data[1], sort_keys=True)
    assert {entry["sha256"] for entry in first.manifest["weights"]}


def _command(*line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "k31compile", *line],
        capture_output=True, text=True, check=False, timeout=500, cwd=folder, env=dict(os.environ),
    )  # fmt: skip


@pytest.mark.skipif(not pico_is_here(), reason="the trained checkpoint is in the source tree only")
def test_pico_is_compiled_and_run_by_the_commands(tmp_path):
    made = _command("compile", "pico:decode", "-o", "pico.k31", "--json", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    told = json.loads(made.stdout)
    assert {Path(one["file"]).parent for one in told["weights"]} == {PICO.resolve()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pico.k31"]
    assert abs(sum(told["phases"].values()) - told["seconds"]) < 0.1 * told["seconds"]
    lines = made.stderr.splitlines()
    assert any("pico:decode: begins, entry 1 of 1, ahead of time" in line for line in lines)
    run = _command("run", "pico.k31", "--json", "--repeat", "3", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    ran = json.loads(run.stdout)
    entry = ran["entries"]["pico:decode"]
    assert entry["inputs"] == "the entry's example"
    assert entry["results"]["result"]["finite"]
    expected = shipped_entries("pico", "decode")[0].call()
    assert entry["results"]["result"]["largest"] == pytest.approx(expected.max().item(), abs=1e-3)
    wrong = _command("run", "pico.k31", "--entry", "pico:x", folder=tmp_path)
    assert wrong.returncode == 1
    assert "there is no entry 'pico:x'; entries: pico:decode" in wrong.stderr


@torch.no_grad()
def test_kimi_linear_of_transformers_decodes_with_a_static_cache(transformers_model, tmp_path, monkeypatch):
    transformers_model("kimi_linear")
    import transformers

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import transformers_entries

    model = transformers_entries.kimi_linear_model()
    tokens, _ = transformers_entries.prompts(22)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    model(tokens, past_key_values=cache, use_cache=True)
    entry = Entry("decode", model, (tokens[:, :1].clone(),), {"past_key_values": cache, "use_cache": True})
    make_artefact([entry], tmp_path / "kimi.k31")
    artefact = load(tmp_path / "kimi.k31")
    other = copy.deepcopy(cache)
    token = tokens[:, :1].clone()
    for _ in range(3):
        expected = model(token, past_key_values=cache, use_cache=True)
        answer = artefact(token, past_key_values=other, use_cache=True)
        assert type(answer) is type(expected)
        assert answer.past_key_values is other
        torch.testing.assert_close(answer.logits, expected.logits, rtol=1e-4, atol=1e-4)
        token = expected.logits[:, -1].argmax(-1)[:, None]
