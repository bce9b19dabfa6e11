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
from k31compile.errors import StoreError
from k31compile.leaves import known
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import Call
from k31compile.leaves.candidates import Candidate
from k31compile.leaves.confirm import agrees
from k31compile.leaves.known import KNOWN, identity
from k31compile.leaves.recall import form_of
from k31compile.leaves.source import examine
from k31compile.signatures import local_key, sign

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
    (folder / "signing.key").write_bytes(local_key())  # the kernels are signed with it
    (folder / "signing.key").chmod(0o600)
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
    for path in (store_with_kernels / "functions").glob("*.signed"):
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


def never(*_):
    raise AssertionError("run again")


def test_what_is_remembered_is_not_run_again(monkeypatch):
    (first,) = compiled_once().leaves
    assert (first["remembered"], first["text"].startswith("confirmed on")) == (False, True)
    (path,) = known._folder().glob("*.signed")
    assert path.stat().st_mode & 0o777 == 0o600
    KNOWN.forget()
    monkeypatch.setattr("k31compile.leaves.recall.confirm_call", never)
    monkeypatch.setattr("k31compile.leaves.recall.agrees", never)
    (leaf,) = compiled_once(9).leaves
    assert (leaf["remembered"], leaf["samples"] >= 16) == (True, True)
    assert leaf["text"].startswith("remembered: confirmed on")


def unsign(path):
    path.write_bytes(path.read_bytes().partition(b"\n")[2])


def link(path):
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def sign_by_another(path):
    body = path.read_bytes().partition(b"\n")[2].replace(b'"scale": 1.0', b'"scale": 2.0')
    path.write_bytes(sign(body, b"another user's").encode() + b"\n" + body)


def put_for_another(path):
    """The file of another function, signed by this user."""
    key = identity(examine(functions.kda_chunk))
    body = path.read_bytes().partition(b"\n")[2].replace(path.name[-47:-7].encode(), key[:40].encode())
    path.write_bytes(sign(body, local_key()).encode() + b"\n" + body)


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "scale": lambda path: path.write_bytes(path.read_bytes().replace(b'"scale": 1.0', b'"scale": 2.0')),
    "unsigned": unsign,
    "of another user": sign_by_another,
    "of another function": put_for_another,
    "open to others": lambda path: path.chmod(0o666),
    "a link": link,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_as_it_was_written_is_named_and_not_used(damage, caplog):
    compiled_once()
    (path,) = known._folder().glob("*.signed")
    whole = path.read_bytes()
    DAMAGE[damage](path)
    KNOWN.forget()
    (leaf,) = compiled_once().leaves
    assert not leaf["remembered"]
    assert f"{path} is not used, its function is confirmed anew" in caplog.text
    assert (path.read_bytes(), path.is_symlink()) == (whole, False)


def through_a_stranger(q, k, v, g, beta, state):
    return functions.kda_recurrent(torch.ops.k31_test_leaves.through(q), k, v, g, beta, state)


def test_what_a_digest_does_not_tell_is_run_once_in_each_process(monkeypatch):
    """A function that calls an operator of somebody else, whose code may be another by then."""
    library = torch.library.Library("k31_test_leaves", "FRAGMENT")
    library.define("through(Tensor x) -> Tensor")
    library.impl("through", lambda x: x.clone(), "CompositeExplicitAutograd")
    assert examine(through_a_stranger).is_opaque
    assert not examine(functions.kda_recurrent).is_opaque
    assert not examine(functions.kda_chunk).is_opaque
    ran = []
    monkeypatch.setattr("k31compile.leaves.recall.agrees", lambda *a: ran.append(1) or agrees(*a))
    tensors = functions.operands(6)
    source, call = examine(through_a_stranger), Call.of(through_a_stranger, tensors, {})
    candidate = Candidate(through_a_stranger, "declared", source, operator="kda_recurrent")
    form, remembered = form_of(candidate, call, stored=True)
    assert (form.scale, remembered, ran) == (1.0, False, [])
    monkeypatch.setattr("k31compile.leaves.recall._checked", [])
    KNOWN.forget()
    assert form_of(candidate, call, stored=True) == (form, True)
    assert ran == [1]
    assert form_of(candidate, call, stored=True) == (form, True)
    assert ran == [1]
    library.impl("through", lambda x: 2 * x, "CompositeExplicitAutograd", allow_override=True)
    monkeypatch.setattr("k31compile.leaves.recall._checked", [])
    KNOWN.forget()
    form, remembered = form_of(candidate, call, stored=True)
    assert (form.scale, remembered) == (2.0, False)


def test_what_was_put_into_torch_makes_a_function_opaque(monkeypatch):
    def helper(x):
        return x

    space = {"torch": torch, "ops": torch.ops, "__name__": "one"}
    code = "def f(q, k):\n    return {}\n"

    def is_opaque(text):
        exec(compile(code.format(text), "a.py", "exec"), space)
        return examine(space["f"]).is_opaque

    for text in ("q.halved() + k", "torch.halved(q) + k", "q.halves + k"):
        assert not is_opaque(text), text
    monkeypatch.setattr(torch.Tensor, "halved", helper, raising=False)
    monkeypatch.setattr(torch.Tensor, "halves", property(helper), raising=False)
    monkeypatch.setattr(torch, "halved", helper, raising=False)
    for text in ("q.halved() + k", "torch.halved(q) + k", "q.halves + k", "torch.ops.mine(q)", "ops.mine.thing(q)"):
        assert is_opaque(text), text
    for text in ("torch.ops.aten.add(q, k)", "ops.aten.add.Tensor(q, k)", "q.sum() + k.mT", "torch.linalg.inv(q)"):
        assert not is_opaque(text), text


@pytest.mark.parametrize(
    "asks",
    [
        "torch.get_num_threads()",
        "torch.backends.mkldnn.enabled",
        "torch.cuda.is_available()",
        "torch.get_float32_matmul_precision() == 'high'",
        "torch.are_deterministic_algorithms_enabled()",
    ],
)
def test_a_function_that_asks_for_its_surroundings_is_no_leaf(asks):
    space = {"torch": torch, "__name__": "one"}
    exec(compile(f"def f(q, k):\n    return q if {asks} else k\n", "a.py", "exec"), space)
    with pytest.raises(Unfit, match="asks how it is called"):
        examine(space["f"])


def test_a_bundle_takes_functions_to_another_machine(tmp_path, monkeypatch):
    compiled_once()
    bundle = dict(known.exported())
    ((name, body),) = bundle.items()
    assert name.startswith("functions/kda_recurrent-")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    monkeypatch.setattr(known, "_folder", lambda: elsewhere)
    monkeypatch.setattr("k31compile.signed_file.local_key", lambda: b"a key of the other machine")
    KNOWN.forget()
    KNOWN.of(examine(functions.kda_recurrent), stored=True)  # looked for before it came
    known.imported(name, body)
    assert dict(known.exported()) == bundle
    known.imported(name, body)
    assert dict(known.exported()) == bundle
    monkeypatch.setattr("k31compile.leaves.recall.confirm_call", never)
    assert compiled_once().leaves[0]["remembered"]
    for wrong_name, wrong in (
        ("../" + name, body),
        ("functions/kda_recurrent-" + "0" * 40 + ".signed", body),
        (name, body[:-9]),
        (name, body.replace(b'"kda_recurrent"', b'"rm"')),
        (name, body.replace(b'"format": 2', b'"format": 1')),
        (name, body.replace(b'"width"', b'"height"')),
    ):
        with pytest.raises(StoreError, match=r"holds no confirmed function|is not named after"):
            known.imported(wrong_name, wrong)
    assert dict(known.exported()) == bundle


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
