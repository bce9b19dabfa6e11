"""What the model could have looked at is part of the promise: each way to lose it is refused or served right."""

import contextlib
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from toy_entries import Pages, Store, rich_arguments

from k31compile.ahead import Progress, capture, make, make_artefact
from k31compile.ahead.weight_table import WeightTable
from k31compile.cache.artefact import program as programs
from k31compile.cache.artefact.arguments import Matcher, describe
from k31compile.cache.artefact.conditions import value_of
from k31compile.cache.artefact.container import open_artefact
from k31compile.cache.artefact.tensors import Mismatch
from k31compile.entry import Entry
from k31compile.errors import ArtefactError, StoreError
from k31compile.options import Options
from k31compile.targets.native.load import EXTERNS, LIBRARY

X = torch.ones(3, 4)


class Held(nn.Module):
    """Holds a buffer and a tensor that is none."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.full((3, 4), 2.0))
        self.plain = torch.full((3, 4), 3.0)

    def forward(self, x):
        return x + self.buffer + self.plain


class Scaled(list):
    """A list that says more than its items do."""


class Named(dict):
    """A dict that says more than its items do."""


def _takes(x, parts):
    return x * parts.scale


def _with_scale(parts, scale):
    parts.scale = scale
    return parts


def _cases():
    model = Held().eval()
    yield "a buffer of the model", Entry("e", model, (model.buffer,)), "x is the model's own buffer"
    yield "a tensor of the model", Entry("e", model, (model.plain,)), "x is the model's own plain"
    told = "parts is a Scaled with the attribute scale beside its items"
    yield "an attribute of a list", Entry("e", _takes, (X, _with_scale(Scaled([X]), 3))), told
    told = "parts is a Named with the attribute scale beside its items"
    yield "an attribute of a dict", Entry("e", _takes, (X, _with_scale(Named(a=X), 3))), told


@pytest.mark.parametrize(("entry", "told"), [pytest.param(*case[1:], id=case[0]) for case in _cases()])
def test_what_no_promise_would_hold_is_refused(own_cache, tmp_path, entry, told):
    with pytest.raises(ArtefactError) as caught:
        make_artefact([entry], tmp_path / "f.k31")
    assert told in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [Scaled, Named])
def test_an_attribute_that_came_later_is_refused_at_a_call(kind):
    items = {"a": X} if kind is Named else [X]
    matcher = Matcher(describe({"parts": kind(items)}).tree, ["a tensor"])
    matcher.take({"parts": kind(items)}, [None])
    with pytest.raises(Mismatch, match="with the attribute scale beside its items"):
        matcher.take({"parts": _with_scale(kind(items), 3)}, [None])


def _by_size_of_another(x, other):
    return x * 2 if other.shape[0] > 4 else x * 3


def test_a_size_that_only_python_looks_at_is_a_condition(own_cache, tmp_path, monkeypatch):
    """The graph does not take the tensor, and was traced for some of its sizes only."""
    monkeypatch.setattr(capture, "build_native", _no_library)
    entry = Entry("e", _by_size_of_another, (X, torch.ones(6, 2)), dynamic={"1": {0: ("N", 2, 9)}})
    built = capture.build_entry(entry, tmp_path, Options(), lambda text: None, {"N": (2, 9)})
    (condition,) = built.data["conditions"]
    assert [value_of(condition, {"N": size}) for size in range(2, 10)] == [False] * 3 + [True] * 5
    assert built.left_out == [{"N": 2}, {"N": 3}, {"N": 4}]


def test_weights_that_share_memory_and_are_updated_are_refused(tmp_path):
    state = torch.zeros(8)

    def table(written):
        made = WeightTable()
        made.add("state", state, "e", is_written=written)
        made.add("part", state[2:4], "e", is_written=False)
        made.add("apart", torch.zeros(2), "e", is_written=True)
        return made

    with pytest.raises(ArtefactError, match="state and part share memory and a call updates it"):
        table(written=True).file_them([], None, tmp_path / "f.safetensors")
    assert list(tmp_path.iterdir()) == []
    table(written=False).file_them([], None, tmp_path / "f.safetensors")
    assert set(load_file(tmp_path / "f.safetensors")) == {"state", "part", "apart"}


def test_a_checkpoint_beside_the_artefact_is_never_written_over(own_cache, tmp_path):
    checkpoint = tmp_path / "f.safetensors"
    save_file({"weight": X}, checkpoint)
    before = checkpoint.read_bytes()
    with pytest.raises(ArtefactError, match="would be written over this file"):
        make_artefact([Entry("line", nn.Linear(4, 4).eval(), (X,))], tmp_path / "f.k31")
    table = WeightTable()
    table.add("weight", X + 1, "e", is_written=False)
    with pytest.raises(ArtefactError, match="--weights"):
        table.file_them([], None, checkpoint)
    assert checkpoint.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["f.safetensors"]
    checkpoint.unlink()
    for value in (X, X + 1):  # what an artefact brought is replaced by what the next one brings
        table.tensors["weight"] = value
        table.file_them([], None, checkpoint)
    assert torch.equal(load_file(checkpoint)["weight"], X + 1)


def _arguments(memory, keys=None):
    _, store = rich_arguments()
    return memory.view(2, 3, 8), Store([Pages(store.layers[0].keys if keys is None else keys, None)], 16)


def test_an_argument_in_the_memory_of_a_weight_is_refused_where_one_is_written(rich, monkeypatch):
    monkeypatch.setattr(programs, "load_native", lambda folder, plan: None)
    memory = torch.zeros(2, 512)
    weights = dict(rich.weights) | {"seen": memory[0, :8].view(1, 8), "L['self'].plain": memory[1, :8]}
    program = programs.Program(rich.programs[0].data, rich.path, weights)
    free = torch.zeros(48)
    cases = {
        "read, and the weight is updated": (_arguments(memory[0, 4:52]), "x shares memory with seen"),
        "updated, and the weight is read": (
            _arguments(free, memory[1, 4:260].view(2, 16, 8)),
            "store.layers[0].keys shares memory with L['self'].plain",
        ),
        "both read": (_arguments(memory[1, 4:52]), ""),
        "beside it": (_arguments(memory[0, 8:56]), ""),
    }
    for name, (args, told) in cases.items():
        with torch.no_grad(), pytest.raises(Mismatch) if told else contextlib.nullcontext() as caught:
            program.take(args, {})
        assert not told or told in str(caught.value), name


def test_a_folder_that_takes_no_file_is_refused_before_anything_is_compiled(own_cache):
    begun = []
    progress = Progress(begins=lambda name, reason: begun.append(name))
    with pytest.raises(StoreError, match=r"the folder of f\.k31 cannot be written.*give -o another folder"):
        make_artefact([Entry("line", nn.Linear(4, 4).eval(), (X,))], Path("/proc/f.k31"), progress=progress)
    assert begun == []


def test_what_cannot_be_written_leaves_nothing_behind(own_cache, tmp_path, monkeypatch):
    def full(*_):
        raise StoreError("it cannot be written: No space left on device")

    monkeypatch.setattr(make, "write_artefact", full)
    monkeypatch.setattr(capture, "build_native", _no_library)
    with pytest.raises(StoreError, match="No space left"):
        make_artefact([Entry("line", nn.Linear(4, 4).eval(), (X,))], tmp_path / "f.k31")
    assert list(tmp_path.iterdir()) == []


def _no_library(graph, inputs, folder):
    for name in (LIBRARY, EXTERNS):
        (folder / name).write_bytes(b"")
    return {"tensors": [], "outputs": []}


def test_a_zip_that_is_no_artefact_is_one_line(own_cache, tmp_path):
    whole = tmp_path / "f.k31"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("manifest.json", "{}")
    data = bytearray(whole.read_bytes())
    data[6] |= 1  # as if it were encrypted
    data[data.index(b"PK\x01\x02") + 8] |= 1
    whole.write_bytes(data)
    with pytest.raises(ArtefactError, match="cut off, damaged or no artefact"):
        open_artefact(whole)
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b" " * (65 << 20))
    with pytest.raises(ArtefactError, match=r"manifest\.json in it has 68157440 bytes"):
        open_artefact(whole)
