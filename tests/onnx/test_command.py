"""`k31 export`: wrong calls in one line, and the files and JSON of one that works."""

import json

import pytest

from k31compile.cli import app

SMALL = """
import torch
from k31compile import Entry


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = torch.nn.Linear(6, 6)

    def forward(self, x, gate):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.out.bias
        return self.out(normed * torch.sigmoid(gate))


def entries():
    model = Two().eval()
    return [Entry(name, model, (torch.randn(size, 6), torch.randn(size, 6))) for name, size in (("a", 2), ("b:c", 5))]
"""


def run(capsys, *arguments):
    code = app.run(["export", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tiny:decode", "-o", "out.onnx"], "k31 export makes ONNX models only; add --onnx"),
        (["tiny:decode", "--onnx", "-o", "out.pt"], "out.pt does not end in .onnx; write -o out.onnx"),
        (["tiny:decode", "--onnx", "-o", "nowhere/out.onnx"], "there is no folder"),
        (["tiny:decode", "--onnx", "-o", "folder.onnx"], "folder.onnx is a folder; give -o a file"),
    ],
)
def test_a_wrong_call_is_one_line(arguments, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.onnx").mkdir()
    code, out, errors = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert len(errors.strip().splitlines()) == 1
    assert told in errors


def test_without_the_libraries_the_remedy_is_named(capsys, tmp_path, monkeypatch):
    from k31compile.onnx_export import libraries

    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    code, _, errors = run(capsys, "tiny:decode", "--onnx", "-o", str(tmp_path / "out.onnx"))
    assert code == 1
    assert 'an export to ONNX needs onnx, onnxscript, onnxruntime; run: pip install "k31compile[onnx]"' in errors


@pytest.mark.slow
def test_two_entries_are_two_files(capsys, tmp_path):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="the extra `onnx` is not installed: pip install -e '.[onnx]'")
    (tmp_path / "two.py").write_text(SMALL)
    target, file = f"{tmp_path / 'two.py'}:entries", tmp_path / "out.onnx"
    code, out, errors = run(capsys, target, "--onnx", "-o", str(file), "--check", "--json")
    assert code == 0
    data = json.loads(out)["entries"]
    assert [line.split(": ")[1] for line in errors.strip().splitlines()] == ["1/2 a", "2/2 b:c"]
    assert sorted(path.name for path in tmp_path.glob("*.onnx")) == ["out.a.onnx", "out.b-c.onnx"]
    for entry in data.values():
        assert entry["operators"] == {"gated_rms_norm": 1}
        assert 0 <= entry["compared"]["output"] < 1e-5
    code, _, errors = run(capsys, target, "--onnx", "-o", str(file), "--entry", "c")
    assert code == 2
    assert "the target has no entry 'c'; entries: a, b:c" in errors
    code, out, _ = run(capsys, target, "--onnx", "-o", str(file), "--entry", "a")
    assert code == 0
    assert f"written: {file}" in out
