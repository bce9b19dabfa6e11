"""Conversion of checkpoints: exact both ways, resumed, bounded, and never half."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from k31compile.errors import WeightFileError
from k31compile.passes.layout.fractal_nz import nz_shape, to_fractal_nz
from k31compile.weights import convert
from k31compile.weights.checkpoint import open_checkpoint
from k31compile.weights.convert import plan_of
from k31compile.weights.journal import JOURNAL, alone_in
from k31compile.weights.record import KEY
from k31compile.weights.rules import by_name, with_patterns

NZ_BY_DEFAULT = {
    "layers.0.q.weight", "layers.0.half.weight", "layers.0.experts", "layers.1.fp8.weight", "Gewicht µ/[0]",
}  # fmt: skip


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


def test_the_default_rule_and_the_blocks(checkpoint, tmp_path):
    plan = convert(checkpoint, tmp_path / "nz")
    assert {step.tensor.name for step in plan.steps if step.layout == "nz"} == NZ_BY_DEFAULT
    assert all(step.reason for step in plan.steps if step.layout == "nd")
    before, after = tensors_of(checkpoint), tensors_of(tmp_path / "nz")
    assert set(before) == set(after)
    for name, tensor in before.items():
        if name in NZ_BY_DEFAULT:
            assert tuple(after[name].shape) == nz_shape(tensor.shape, tensor.dtype)
            assert same_bits(after[name], to_fractal_nz(tensor))
        else:
            assert same_bits(after[name], tensor)
            assert after[name].shape == tensor.shape


def test_the_record_says_layout_shape_dtype_tool_and_source(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "nz")
    name = "model-00001-of-00002.safetensors"
    with safe_open(tmp_path / "nz" / name, framework="pt") as opened:
        metadata = opened.metadata()
    record = json.loads(metadata[KEY])
    assert metadata["format"] == "pt"
    assert record["tool"].startswith("k31compile ")
    import hashlib

    assert record["source_sha256"] == hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    assert record["tensors"]["layers.0.q.weight"] == {"layout": "nz", "shape": [64, 32], "dtype": "BF16"}
    assert record["tensors"]["layers.0.bias"]["layout"] == "nd"
    index = json.loads((tmp_path / "nz" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(tmp_path / "nz").values())
    assert (tmp_path / "nz" / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()


@pytest.mark.parametrize("include", [[], ["*"]], ids=["default", "all that can be, padded"])
def test_back_to_nd_gives_the_same_files(checkpoint, tmp_path, include):
    names = list(tensors_of(checkpoint))
    choose = with_patterns(by_name, include, [], names)
    plan = convert(checkpoint, tmp_path / "nz", choose=choose)
    if include:
        padded = {"layers.0.odd.weight", "layers.1.int.weight", "layers.1.fp32.weight", "embed_tokens.weight"}
        assert padded < {step.tensor.name for step in plan.steps if step.layout == "nz"}
    convert(tmp_path / "nz", tmp_path / "nd", layout="nd")
    assert files_of(tmp_path / "nd") == files_of(checkpoint)


def test_a_single_file_and_hashes_of_tensors_in_an_index(tmp_path):
    tensors = {"a.weight": torch.randn(32, 16).bfloat16(), "b": torch.randn(3)}
    save_file(tensors, tmp_path / "one.safetensors")
    convert(tmp_path / "one.safetensors", tmp_path / "nz")
    assert sorted(files_of(tmp_path / "nz")) == ["one.safetensors"]
    from k31compile.model import K31Config, K31ForCausalLM
    from k31compile.model.weights import load_weights, save_weights

    torch.manual_seed(0)
    model = K31ForCausalLM(K31Config.tiny()).to_serving_dtype(torch.bfloat16)
    save_weights(model, tmp_path / "model", max_shard_bytes=200_000)
    convert(tmp_path / "model", tmp_path / "blocks")
    convert(tmp_path / "blocks", tmp_path / "back", layout="nd")
    load_weights(model, tmp_path / "back")
    index = json.loads((tmp_path / "blocks" / "model.safetensors.index.json").read_text())
    assert set(index["metadata"]["sha256"]) == set(index["weight_map"])
    with pytest.raises(Exception, match="stored in blocks"):
        load_weights(model, tmp_path / "blocks")


def test_never_twice(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "nz")
    with pytest.raises(WeightFileError, match=r"nothing to convert to nz: .*stored in blocks already"):
        convert(tmp_path / "nz", tmp_path / "twice")
    assert not (tmp_path / "twice").exists()
    more = with_patterns(by_name, ["layers.0.odd.weight"], [], tensors_of(checkpoint))
    plan = convert(tmp_path / "nz", tmp_path / "more", choose=more)
    assert plan.changed() == 1
    assert same_bits(tensors_of(tmp_path / "more")["layers.0.experts"], tensors_of(tmp_path / "nz")["layers.0.experts"])
    convert(tmp_path / "more", tmp_path / "nd", layout="nd")
    assert files_of(tmp_path / "nd") == files_of(checkpoint)
    with pytest.raises(WeightFileError, match="nothing to convert to nd"):
        convert(checkpoint, tmp_path / "other", layout="nd")


def test_patterns_overrule_and_must_fit(checkpoint):
    names = list(tensors_of(checkpoint))
    choose = with_patterns(by_name, ["embed*"], ["layers.0.*"], names)
    plan = plan_of(checkpoint, choose=choose)
    chosen = {step.tensor.name for step in plan.steps if step.layout == "nz"}
    assert chosen == {"embed_tokens.weight", "layers.1.fp8.weight", "Gewicht µ/[0]"}
    with pytest.raises(WeightFileError, match=r"--exclude 'leyers\*' fits no tensor"):
        with_patterns(by_name, [], ["leyers*"], names)


def damaged(folder, how):
    shard = folder / "model-00002-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    if how == "cut off":
        shard.write_bytes(shard.read_bytes()[:-5])
    elif how == "text":
        shard.write_text("hello")
    elif how == "missing":
        shard.unlink()
    elif how == "index":
        index.write_text("{")
    elif how == "reach":
        index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    elif how == "unnamed":
        data = json.loads(index.read_text())
        del data["weight_map"]["layers.1.scalar"]
        index.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("cut off", "cut off or no safetensors file"),
        ("text", "cut off or no safetensors file"),
        ("missing", "the index names it, and there is no such file"),
        ("index", "the index cannot be read"),
        ("reach", "is no file of its folder"),
        ("unnamed", "does not name layers.1.scalar"),
    ],
)
def test_a_damaged_source_is_one_line_and_nothing_is_written(checkpoint, tmp_path, how, says):
    damaged(checkpoint, how)
    with pytest.raises(WeightFileError, match=says) as caught:
        convert(checkpoint, tmp_path / "nz")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "nz").exists()


def test_the_destination_must_be_free(checkpoint, tmp_path):
    with pytest.raises(WeightFileError, match="one folder"):
        convert(checkpoint, checkpoint)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(WeightFileError, match=r"the folder holds mine.txt already, and nothing is written over \("):
        convert(checkpoint, tmp_path / "full")
    assert list(files_of(tmp_path / "full")) == ["mine.txt"]
    (tmp_path / "held").mkdir()
    with alone_in(tmp_path / "held"), pytest.raises(WeightFileError, match="another process"):
        convert(checkpoint, tmp_path / "held")


@contextmanager
def failing(monkeypatch, after, number):
    """The disk fails after so many bytes of tensors."""
    from k31compile.weights.tensor_file import HashingWriter

    written = 0
    plain = HashingWriter.write

    def write(self, data):
        nonlocal written
        written += len(data)
        if written > after:
            raise OSError(number, os.strerror(number))
        plain(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(HashingWriter, "write", write)
        yield


def test_a_full_disk_is_one_line_and_leaves_nothing_half(checkpoint, tmp_path, monkeypatch):
    with failing(monkeypatch, 3000, errno.ENOSPC), pytest.raises(WeightFileError, match="No space left") as caught:
        convert(checkpoint, tmp_path / "new" / "nz")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()
    size = (checkpoint / "model-00001-of-00002.safetensors").stat().st_size + 5000
    with failing(monkeypatch, size, errno.ENOSPC), pytest.raises(WeightFileError, match="the same call goes on"):
        convert(checkpoint, tmp_path / "nz")
    assert sorted(files_of(tmp_path / "nz")) == [JOURNAL, "model-00001-of-00002.safetensors"]
    with pytest.raises(WeightFileError, match="interrupted conversion, and not all of its shards"):
        open_checkpoint(tmp_path / "nz")
    convert(checkpoint, tmp_path / "nz")
    convert(checkpoint, tmp_path / "whole")
    assert files_of(tmp_path / "nz") == files_of(tmp_path / "whole")


def test_a_real_limit_of_the_system(checkpoint, tmp_path):
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000));"
        "from k31compile.cli.app import run; sys.exit(run(['weights', 'convert', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-P", "-c", code, str(checkpoint), str(tmp_path / "nz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "File too large" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "nz").exists()


def test_a_folder_that_cannot_be_written(checkpoint, tmp_path, monkeypatch):
    with pytest.raises(WeightFileError, match="cannot be written"):
        convert(checkpoint, "/proc/self/no-such-place")

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "nz").mkdir()
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(WeightFileError, match="Read-only file system"):
        convert(checkpoint, tmp_path / "nz")
    assert not files_of(tmp_path / "nz")


def test_an_interrupted_conversion_of_another_plan_is_left_alone(checkpoint, tmp_path, monkeypatch):
    size = (checkpoint / "model-00001-of-00002.safetensors").stat().st_size + 5000
    with failing(monkeypatch, size, errno.ENOSPC), pytest.raises(WeightFileError):
        convert(checkpoint, tmp_path / "nz")
    choose = with_patterns(by_name, [], ["layers.0.q*"], tensors_of(checkpoint))
    before = files_of(tmp_path / "nz")
    with pytest.raises(WeightFileError, match="an interrupted conversion of other tensors"):
        convert(checkpoint, tmp_path / "nz", choose=choose)
    assert files_of(tmp_path / "nz") == before


def test_finished_shards_are_kept_if_their_bytes_are_right(checkpoint, tmp_path, monkeypatch):
    size = (checkpoint / "model-00001-of-00002.safetensors").stat().st_size + 5000
    first = tmp_path / "nz" / "model-00001-of-00002.safetensors"
    for spoil in (False, True):
        with failing(monkeypatch, size, errno.ENOSPC), pytest.raises(WeightFileError):
            convert(checkpoint, tmp_path / "nz")
        kept = first.stat().st_ino
        if spoil:
            first.write_bytes(first.read_bytes()[:-1] + b"?")
        convert(checkpoint, tmp_path / "nz")
        assert spoil or first.stat().st_ino == kept
        again = tmp_path / f"again{spoil}"
        convert(checkpoint, again)
        assert files_of(again) == files_of(tmp_path / "nz")
        for path in (tmp_path / "nz").iterdir():
            path.unlink()


def test_what_a_killed_process_had_begun_is_removed(checkpoint, tmp_path, monkeypatch):
    convert(checkpoint, tmp_path / "whole")
    (tmp_path / "nz").mkdir()
    (tmp_path / "nz" / f".{JOURNAL}.abc").write_text("{")
    size = (checkpoint / "model-00001-of-00002.safetensors").stat().st_size + 5000
    with failing(monkeypatch, size, errno.ENOSPC), pytest.raises(WeightFileError):
        convert(checkpoint, tmp_path / "nz")
    for name in (".config.json.x1", ".model-00002-of-00002.safetensors.x2", f".{JOURNAL}.x3"):
        (tmp_path / "nz" / name).write_text("half")
    convert(checkpoint, tmp_path / "nz")
    assert files_of(tmp_path / "nz") == files_of(tmp_path / "whole")


def big_checkpoint(folder, shards, rows):
    folder.mkdir()
    for number in range(shards):
        tensors = {f"layers.{number}.{i}.weight": torch.full((rows, 1024), number * 8 + i).bfloat16() for i in range(4)}
        save_file(tensors, folder / f"model-{number}.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_killed_at_any_moment_and_repeated_it_gives_the_same_bytes(tmp_path):
    source = big_checkpoint(tmp_path / "source", 6, 1024)
    convert(source, tmp_path / "whole")
    expected = files_of(tmp_path / "whole")
    command = [sys.executable, "-P", "-m", "k31compile", "weights", "convert", str(source), str(tmp_path / "nz")]
    generator, kills = random.Random(os.getpid()), 0
    for _ in range(40):
        child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert child.stderr is not None
        line = child.stderr.readline()
        if "convert:" in line and kills < 6:
            time.sleep(generator.random() * 0.12)
            child.send_signal(signal.SIGKILL)
        child.communicate()
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
        kills += 1
    assert kills
    assert files_of(tmp_path / "nz") == expected


MEMORY = """
import sys
from pathlib import Path
from k31compile.weights import convert
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
convert(sys.argv[1], Path(sys.argv[3]) / "small")
before = peak()
convert(sys.argv[2], Path(sys.argv[3]) / "big")
convert(Path(sys.argv[3]) / "big", Path(sys.argv[3]) / "back", layout="nd")
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak is read from /proc")
@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    small = big_checkpoint(tmp_path / "small", 1, 1024)
    big = big_checkpoint(tmp_path / "source", 2, 16384)
    largest = 16384 * 1024 * 2
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-P", "-c", MEMORY, str(small), str(big), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2.3 * largest, f"{int(done.stdout) / largest:.2f} times the largest tensor"
