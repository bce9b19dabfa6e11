"""Files that others wrote, or nobody should have: one line each, nothing half, nothing of the user's removed."""

import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from k31compile.errors import WeightFileError
from k31compile.weights import convert, load
from k31compile.weights.record import KEY
from k31compile.weights.rules import with_patterns

MATRIX = torch.arange(1024).view(32, 32).to(torch.bfloat16)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.float8_e5m2]


def write_raw(path, header, data):
    """A file with any header: a dictionary, or its text."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_recorded(path, record, dtype, stored, nbytes):
    """A file of one tensor w with this record of its layout."""
    said = {"version": 1, "tool": "x", "source_sha256": "0", "tensors": {"w": record}}
    header = {
        "__metadata__": {KEY: json.dumps(said)},
        "w": {"dtype": dtype, "shape": stored, "data_offsets": [0, nbytes]},
    }
    write_raw(path, header, bytes(nbytes))


@pytest.mark.parametrize(
    ("shape", "dtype", "stored", "nbytes", "says"),
    [
        ([4, 4], "I64", [4, 4], 128, "w is recorded as nz, and I64 .4, 4. has no blocks"),
        ([64], "BF16", [64], 128, "has no blocks"),
        ([], "BF16", [], 2, "has no blocks"),
        ("22", "BF16", [1, 1, 16, 16], 512, "'22' is no shape"),
        ([-3, 16], "BF16", [1, 0, 16, 16], 0, "is no shape"),
        ([float("inf"), 16], "BF16", [1, 1, 16, 16], 512, "is no shape"),
        ([2.5, 16], "BF16", [1, 1, 16, 16], 512, "is no shape"),
    ],
)
def test_a_record_of_blocks_that_cannot_be_is_refused(tmp_path, shape, dtype, stored, nbytes, says):
    path = tmp_path / "w.safetensors"
    write_recorded(path, {"layout": "nz", "shape": shape, "dtype": dtype}, dtype, stored, nbytes)
    with pytest.raises(WeightFileError, match=says):
        convert(path, tmp_path / "nd", "nd")
    with pytest.raises(WeightFileError, match=says):
        load(path, nn.Linear(4, 4))
    assert not (tmp_path / "nd").exists()


def test_a_record_that_is_nested_without_end_is_refused(tmp_path):
    header = {"__metadata__": {KEY: "[" * 100_000}, "w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    write_raw(tmp_path / "w.safetensors", header, b"0")
    with pytest.raises(WeightFileError, match="its record of layouts is damaged"):
        convert(tmp_path / "w.safetensors", tmp_path / "nz")


def test_metadata_that_is_null(tmp_path):
    header = {"__metadata__": None, "w": {"dtype": "BF16", "shape": [32, 32], "data_offsets": [0, 2048]}}
    write_raw(tmp_path / "w.safetensors", header, bytes(range(256)) * 8)
    convert(tmp_path / "w.safetensors", tmp_path / "nz")
    convert(tmp_path / "nz", tmp_path / "nd", "nd")
    assert (tmp_path / "nd" / "w.safetensors").read_bytes().endswith(bytes(range(256)) * 8)


@pytest.mark.parametrize("said", [{}, {"__metadata__": {}}, {"__metadata__": {"format": "pt"}}])
def test_what_a_file_says_of_itself_comes_back(tmp_path, said):
    """No metadata, and metadata without an entry, are other bytes."""
    header = {**said, "w": {"dtype": "BF16", "shape": [32, 32], "data_offsets": [0, 2048]}}
    write_raw(tmp_path / "w.safetensors", header, bytes(range(256)) * 8)
    convert(tmp_path / "w.safetensors", tmp_path / "nz")
    convert(tmp_path / "nz", tmp_path / "nd", "nd")
    data = (tmp_path / "nd" / "w.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    assert json.loads(data[8 : 8 + size]) == header


@pytest.mark.parametrize("metadata", [None, [], {"sha256": {"gone": "0", "w": "1"}}, {"sha256": []}])
def test_the_metadata_of_an_index_may_be_anything(tmp_path, metadata):
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": MATRIX}, source / "a.safetensors")
    index = {"metadata": metadata, "weight_map": {"w": "a.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(source, tmp_path / "nz")
    written = json.loads((tmp_path / "nz" / "model.safetensors.index.json").read_text())
    assert written["weight_map"] == index["weight_map"]
    if isinstance(metadata, dict) and metadata["sha256"]:
        assert list(written["metadata"]["sha256"]) == ["w"]
    else:
        assert written["metadata"] == metadata
    assert not [path for path in (tmp_path / "nz").iterdir() if path.name.startswith(".")]


def test_a_resumed_conversion_removes_its_own_remains_and_no_file_of_the_users(tmp_path):
    source, result = tmp_path / "source", tmp_path / "nz"
    source.mkdir()
    for name in ("a", "b"):
        save_file({name: MATRIX}, source / f"{name}.safetensors")
    (source / "config.json").write_text("{}")

    def interrupt(name):
        if name.startswith("b"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, result, advance=interrupt)
    for name in (".gitattributes", ".b.safetensors.x1", ".config.json.x2"):
        (result / name).write_text("mine, or begun")
    convert(source, result)
    assert sorted(path.name for path in result.iterdir()) == [
        ".gitattributes", "a.safetensors", "b.safetensors", "config.json",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_called_a_shard_and_is_no_file_is_told_as_it_is(tmp_path, kind):
    save_file({"w": MATRIX}, tmp_path / "a.safetensors")
    if kind == "folder":
        (tmp_path / "b.safetensors").mkdir()
    else:
        os.symlink("nowhere", tmp_path / "b.safetensors")
    with pytest.raises(WeightFileError, match=r"the folder has that name, and there is no such file .*b\.safetensors"):
        convert(tmp_path, tmp_path / "nz")


def test_names_that_are_too_long_are_one_line(tmp_path):
    save_file({"w": MATRIX}, tmp_path / "a.safetensors")
    with pytest.raises(WeightFileError, match="it cannot be read: File name too long"):
        convert(tmp_path / ("x" * 300), tmp_path / "nz")
    with pytest.raises(WeightFileError, match="the folder cannot be written: File name too long"):
        convert(tmp_path / "a.safetensors", tmp_path / ("x" * 300))


def test_a_model_that_cannot_be_filled_is_told_before_anything_is_copied(tmp_path):
    save_file({"first": MATRIX, "second": MATRIX.clone()}, tmp_path / "a.safetensors")

    def model(second):
        made = nn.Module()
        made.first, made.second = nn.Buffer(torch.zeros(32, 32, dtype=torch.bfloat16)), nn.Buffer(second)
        return made

    with torch.inference_mode():
        frozen = torch.zeros(32, 32, dtype=torch.bfloat16)
    cases = [
        (torch.zeros(1, 32, dtype=torch.bfloat16).expand(32, 32), "second of the model is an expanded tensor"),
        (frozen, "second of the model was made in inference mode"),
    ]
    for second, says in cases:
        made = model(second)
        with pytest.raises(WeightFileError, match=says):
            load(tmp_path / "a.safetensors", made)
        assert not made.first.any()
    with torch.inference_mode():
        load(tmp_path / "a.safetensors", model(frozen))
    assert torch.equal(frozen, MATRIX)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=5), min_size=1, max_size=4),
    picks=st.lists(st.tuples(st.sampled_from(DTYPES), st.text(max_size=8)), min_size=4, max_size=4),
    seed=st.integers(0, 2**20),
)
@pytest.mark.slow
def test_any_file_of_the_library_comes_back_byte_for_byte(tmp_path_factory, shapes, picks, seed):
    folder = tmp_path_factory.mktemp("drawn")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for number, (shape, (dtype, name)) in enumerate(zip(shapes, picks, strict=False)):
        count = torch.Size(shape).numel() * dtype.itemsize
        drawn = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        tensors[f"{name}{number}"] = drawn.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    tensors["w"] = MATRIX.clone()
    save_file(tensors, folder / "a.safetensors", {"format": "pt"})
    everything = with_patterns(lambda name, record: pytest.fail(name), ["*"], [], list(tensors))
    convert(folder / "a.safetensors", folder / "nz", choose=everything)
    convert(folder / "nz" / "a.safetensors", folder / "nd", "nd")
    assert (folder / "nd" / "a.safetensors").read_bytes() == (folder / "a.safetensors").read_bytes()
    assert set(load_file(folder / "nz" / "a.safetensors")) == set(tensors)
