"""What one process learned serves the next, by what a function is; broken files are named and not used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import functions
import pytest
import torch

import k31compile
from k31compile import store
from k31compile.leaves import known
from k31compile.leaves.known import KNOWN
from k31compile.leaves.source import examine

OPS = {"codegen": "ops", "fuse": ["kda_recurrent"]}
MODEL = """
import torch
HALF = {half}
def scaled(x):
    return {helper}
def my_rule(q, k, v, g, beta, state):
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        write = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, :, None]).sum(-2))
        state = state + k[:, t, :, :, None] * write[:, :, None]
        out.append((state * scaled(q[:, t, :, :, None])).sum(-2))
    return torch.stack(out, 1), state
def model(q, k, v, g, beta, state):
    return my_rule(q.tanh(), k, v, g, beta, state)
"""
RUN = """
import json, sys, torch, k31compile
sys.path.insert(0, {tests!r}); sys.path.insert(0, {here!r})
import functions, their_model
tensors = functions.operands({length})
with torch.no_grad():
    torch.compile(their_model.model, backend="k31", options={options!r})(*tensors)
report = k31compile.last_report()
print(json.dumps([report.fused, [l["why"] for l in report.leaves], report.learned, report.nodes_before]))
"""


@pytest.fixture
def store_with_kernels(tmp_path):
    """A store of its own, with the kernels that are built already."""
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    (store.cache_dir() / "kernels").mkdir(mode=0o700, exist_ok=True)
    os.symlink(store.cache_dir() / "kernels", folder / "kernels")
    return folder


def in_a_new_process(folder, length, half=0.5, helper="x * HALF", **options):
    (folder.parent / "their_model.py").write_text(MODEL.format(half=half, helper=helper))
    code = RUN.format(
        tests=str(Path(__file__).parent), here=str(folder.parent), length=length, options={**OPS, **options}
    )
    root = str(Path(k31compile.__file__).parents[1])
    environment = {**os.environ, "K31_CACHE_DIR": str(folder), "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (*json.loads(done.stdout.splitlines()[-1]), done.stderr)


@pytest.mark.slow
def test_unknown_code_pays_one_trace_and_never_again(store_with_kernels):
    fused, why, learned, first_nodes, _ = in_a_new_process(store_with_kernels, 6)
    assert (fused, why, learned) == ({"kda_recurrent": 1}, [], ["my_rule"])
    for length in (6, 200):
        fused, why, learned, nodes, _ = in_a_new_process(store_with_kernels, length)
        assert (fused, why, learned) == ({"kda_recurrent": 1}, ["learned"], [])
        assert nodes < 20 < first_nodes
    # Another helper, or another constant that it reads, is another function: nothing of it is known.
    assert in_a_new_process(store_with_kernels, 6, helper="x * HALF + 0")[1:3] == ([], ["my_rule"])
    assert in_a_new_process(store_with_kernels, 6, half=0.25)[1:3] == ([], ["my_rule"])
    assert in_a_new_process(store_with_kernels, 6)[1] == ["learned"]
    assert in_a_new_process(store_with_kernels, 6, cache=False)[1:3] == ([], [])
    for path in (store_with_kernels / "functions").glob("*.json"):
        path.write_text(path.read_text().replace('"scale": 0.5', '"scale": 0.75'))
    fused, why, _, _, said = in_a_new_process(store_with_kernels, 6)
    assert (fused, why) == ({"kda_recurrent": 1}, ["learned"])
    assert "my_rule-" in said
    assert "confirmed anew" in said


@torch.no_grad()
def compiled_once(length=6):
    torch._dynamo.reset()
    model = torch.compile(lambda *a: functions.kda_recurrent(*a), backend="k31", options=OPS)
    tensors = functions.operands(length)
    for ours, theirs in zip(model(*tensors), functions.kda_recurrent(*tensors), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    return k31compile.last_report()


def test_what_is_remembered_is_run_once_and_not_confirmed_again(monkeypatch):
    compiled_once()
    (path,) = known._folder().glob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    KNOWN.forget()

    def never(*_):
        raise AssertionError("confirmed again")

    monkeypatch.setattr("k31compile.leaves.recall.confirm_call", never)
    assert compiled_once(9).leaves[0]["samples"] >= 16


@pytest.mark.parametrize("damage", ["cut", "scale", "foreign"])
def test_a_file_that_is_not_as_it_was_written_is_named_and_not_used(damage, caplog):
    compiled_once()
    (path,) = known._folder().glob("*.json")
    data = path.read_text()
    if damage == "cut":
        path.write_text(data[: len(data) // 2])
    elif damage == "scale":
        path.write_text(data.replace('"scale": 1.0', '"scale": 2.0'))
    else:
        path.chmod(0o666)
    KNOWN.forget()
    assert compiled_once().leaves
    assert path.name in caplog.text


def test_a_well_formed_lie_is_found_by_running_once(caplog):
    compiled_once()
    (path,) = known._folder().glob("*.json")
    source = examine(functions.kda_recurrent)
    forms = KNOWN.of(source, stored=True).forms
    for key, (form,) in forms.items():
        forms[key] = [form.with_scale(2.0)]
    KNOWN.keep(source)
    KNOWN.forget()
    report = compiled_once()
    assert report.leaves[0]["samples"] >= 16
    assert "kda_recurrent is not what an earlier process remembers, and is confirmed anew" in caplog.text
    assert '"scale": 1.0' in path.read_text()


def test_the_digest_is_of_what_a_function_does_and_not_of_where_it_stands():
    space = {"__name__": "one"}
    other = {"__name__": "two"}
    code = "def f(q, k):\n    return helper(q) + k\ndef helper(x):\n    return x * C\nC = 2\n"
    exec(compile(code, "a.py", "exec"), space)
    exec(compile("\n\n" + code, "b.py", "exec"), other)
    digest = examine(space["f"]).digest
    assert examine(other["f"]).digest == digest
    for change in ("x * C", "x + C"), ("C = 2", "C = 3"), ("+ k", "- k"), ("(q, k)", "(q, k=1)"):
        changed = {"__name__": "one"}
        exec(compile(code.replace(*change), "a.py", "exec"), changed)
        assert examine(changed["f"]).digest != digest, change
