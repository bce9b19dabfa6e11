"""k31 weights: what files hold, and their conversion, from outside."""

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture
def file(tmp_path):
    """A file with a weight, an odd weight, an embedding and a bias."""
    tensors = {
        "up.weight": torch.randn(32, 48).bfloat16(),
        "odd.weight": torch.randn(33, 17).bfloat16(),
        "embed.weight": torch.randn(32, 16).bfloat16(),
        "up.bias": torch.randn(32).bfloat16(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_convert_inspect_and_back(file, tmp_path, k31, k31_json):
    code, out, err = k31("weights", "convert", str(file), str(tmp_path / "nz"))
    assert code == 0
    assert "1 of 4 tensors converted to nz" in out
    assert err.splitlines() == ["convert: 1/1 model.safetensors"]
    code, data = k31_json("weights", "inspect", str(tmp_path / "nz"))
    assert code == 0
    found = {row["name"]: row for row in data["tensors"]}
    assert (found["up.weight"]["layout"], found["up.weight"]["shape"]) == ("nz", [32, 48])
    assert found["up.weight"]["stored_shape"] == [3, 2, 16, 16]
    assert found["up.bias"]["layout"] == "nd"
    assert data["files"]["model.safetensors"]["tool"].startswith("k31compile")
    code, out, _ = k31("weights", "inspect", str(tmp_path / "nz"))
    assert code == 0
    assert "4 tensors, 1 in blocks" in out
    code, out, _ = k31("weights", "convert", str(tmp_path / "nz"), str(tmp_path / "nd"), "--layout", "nd")
    assert code == 0
    assert (tmp_path / "nd" / "model.safetensors").read_bytes() == file.read_bytes()


def test_a_dry_run_lists_the_decisions_and_writes_nothing(file, tmp_path, k31, k31_json):
    where = str(tmp_path / "nz")
    code, data = k31_json("weights", "convert", str(file), where, "--dry-run", "--include", "odd*", "--exclude", "up*")
    assert code == 0
    assert data["written"] is None
    decided = {row["name"]: (row["layout"], row["reason"]) for row in data["tensors"]}
    assert decided["odd.weight"] == ("nz", "")
    assert decided["up.weight"] == ("nd", "--exclude leaves it out")
    assert "by its name it is an embedding" in decided["embed.weight"][1]
    code, out, _ = k31("weights", "convert", str(file), where, "--dry-run")
    assert code == 0
    assert "multiples" in out
    assert "nothing was written" in out
    assert not (tmp_path / "nz").exists()


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("convert", "nowhere", "nz"), 1, "K31-0502: there is no such file or folder (nowhere)"),
        (("convert", "FILE", "nz", "--layout", "zn"), 2, "there is no layout 'zn'; layouts: nz, nd"),
        (("convert", "FILE", "nz", "--layout", "nd"), 1, "nothing to convert to nd"),
        (("convert", "FILE", "nz", "--layout", "nd", "--include", "a"), 2, "choose what becomes blocks"),
        (("convert", "FILE", "nz", "--product", "ascend-950"), 2, "add --for TARGET, or leave --product out"),
        (("convert", "FILE", "FILE"), 2, "is a file; give a folder that is empty or new"),
        (("convert", "FILE", "nz", "--include", "a"), 1, "--include 'a' fits no tensor"),
        (("inspect", "nowhere"), 1, "there is no such file or folder"),
        (("convert", "FILE"), 2, "Missing argument 'DST'"),
        (("turn",), 2, "No such command 'turn'"),
    ],
)
def test_wrong_use_is_one_line(file, tmp_path, monkeypatch, k31, argv, code, says):
    monkeypatch.chdir(tmp_path)
    argv = [str(file) if part == "FILE" else part for part in argv]
    got, out, err = k31("weights", *argv)
    assert got == code
    assert out == ""
    (line,) = err.splitlines()
    assert says in line
    assert not (tmp_path / "nz").exists()


def test_explain_tells_which_weights_stay_plain(tmp_path, k31, k31_json):
    """Row F1: a layer with one output, and the reason where a person looks for it."""
    text = "import torch\nfrom torch import nn\nfrom k31compile import Entry\n"
    text += "def entry():\n    model = nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 1))\n"
    text += "    return Entry('two', model, (torch.randn(3, 64),))\n"
    (tmp_path / "two.py").write_text(text)
    argv = ("explain", f"{tmp_path / 'two.py'}:entry", "--layout")
    code, data = k31_json(*argv, "nz")
    assert code == 0
    assert {row["name"]: row["layout"] for row in data["weights"]} == {"0.weight": "nz", "1.weight": "nd"}
    code, out, _ = k31(*argv, "nz")
    assert "weight 1.weight (float32 1x33) stays as it is: a side of [1, 33] is 1" in out
    code, _, err = k31(*argv, "zn")
    assert code == 2
    assert "option 'layout' does not take 'zn'" in err


FACTORY = """
import torch
from torch import nn
from k31compile import Entry

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.slope = nn.Parameter(torch.ones(64, 32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.down(self.up(x).relu())) + (x @ self.slope.t()) * self.slope.sum()

def entry():
    torch.manual_seed(0)
    return Entry("small", Small().bfloat16().eval(), (torch.arange(6).view(2, 3),))
"""


def test_a_models_graph_decides(tmp_path, k31, k31_json):
    (tmp_path / "small.py").write_text(FACTORY)
    tensors = {
        "embed.weight": torch.randn(64, 32).bfloat16(), "up.weight": torch.randn(64, 32).bfloat16(),
        "down.weight": torch.randn(32, 64).bfloat16(), "slope": torch.randn(64, 32).bfloat16(),
        "rotary": torch.randn(16, 16).bfloat16(),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    target = f"{tmp_path / 'small.py'}:entry"
    argv = ("weights", "convert", str(tmp_path / "model.safetensors"), str(tmp_path / "nz"), "--for", target)
    code, data = k31_json(*argv)
    assert code == 0
    decided = {row["name"]: (row["layout"], row["reason"]) for row in data["tensors"]}
    assert decided["up.weight"][0] == decided["down.weight"][0] == "nz"
    assert "embedding" in decided["embed.weight"][1]
    assert "sum" in decided["slope"][1]
    assert "no graph of small reads it" in decided["rotary"][1]
    assert load_file(tmp_path / "nz" / "model.safetensors")["up.weight"].dim() == 4
    save_file({"other": tensors["rotary"]}, tmp_path / "other.safetensors")
    argv = ("weights", "convert", str(tmp_path / "other.safetensors"), str(tmp_path / "no"), "--for", target)
    code, _, err = k31(*argv)
    assert code == 1
    assert "none of its tensors is a parameter of" in err


def test_names_cannot_speak_to_the_terminal(tmp_path, k31):
    save_file({"w\n\x1b[31m[red]": torch.ones(32, 32)}, tmp_path / "odd.safetensors")
    for call in (["inspect", "{}"], ["convert", "{}", "nowhere", "--dry-run", "--include", "*"]):
        code, out, _ = k31("weights", *(part.format(tmp_path / "odd.safetensors") for part in call))
        assert code == 0
        assert "\x1b[31m" not in out
        assert "w\\n\\x1b[31m[red]" in out.replace("\n", "")
