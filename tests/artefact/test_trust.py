"""Nothing of a file is used before its owner, mode, signature and hashes were found right; damage is told in a line."""

import contextlib
import json
import os
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_entries import many_arguments

from k31compile import load
from k31compile.cache.artefact import container, flags
from k31compile.errors import ArtefactError, StoreError


@pytest.fixture
def copied(made, tmp_path):
    """A copy of `many` and its weights, to be damaged."""
    for suffix in (".k31", ".safetensors"):
        shutil.copy(made.files["many"].with_suffix(suffix), tmp_path / f"many{suffix}")
    return tmp_path / "many.k31"


def _names(path):
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def _rewritten(path, change):
    """Put an artefact together again with members changed by `change(name, data)`; None leaves one out."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            changed = change(name, data)
            if changed is not None:
                archive.writestr(name, changed)


def _remade(path, **changed):
    """The same artefact, signed, with other things in its manifest."""
    opened = container.open_artefact(path)
    container.write_artefact(path, {**opened.manifest, **changed}, opened.files, opened.places)


def test_what_is_kept_is_as_listed_and_holds_no_path(made):
    opened = container.open_artefact(made.files["many"])
    text = container.canonical(opened.manifest).decode()
    assert str(made.folder) not in text
    assert os.environ["K31_CACHE_DIR"] not in text
    assert {"0/library.so", "0/graph.txt", "0/report.json", "0/example.safetensors"} <= set(opened.files)


def test_each_flipped_byte_is_found(copied):
    data, whole = bytearray(copied.read_bytes()), container.open_artefact(copied).files
    for place in range(0, len(data), len(data) // 23):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        copied.write_bytes(flipped)
        with contextlib.suppress(ArtefactError):
            # It is refused, or the byte is one that no reader looks at, such as a date.
            assert container.open_artefact(copied).files == whole


@pytest.mark.parametrize("part", ["flipped", "emptied", "left out"])
def test_each_member_is_checked(copied, part):
    whole = copied.read_bytes()
    for name in _names(copied):
        if name == "places.json" and part == "flipped":
            continue
        copied.write_bytes(whole)

        def change(member, data, name=name):
            if member != name:
                return data
            middle = len(data) // 2
            flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            return {"flipped": flipped, "emptied": b"", "left out": None}[part]

        _rewritten(copied, change)
        with pytest.raises(ArtefactError) as caught:
            load(copied)
        assert str(copied) in str(caught.value)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
def test_a_cut_file_is_refused(copied, kept):
    data = copied.read_bytes()
    copied.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ArtefactError, match="cut off, damaged or no artefact"):
        load(copied)


def test_a_file_that_was_put_in_is_refused(copied):
    with zipfile.ZipFile(copied, "a") as archive:
        archive.writestr("1/more.so", b"code")
    with pytest.raises(ArtefactError, match=r"its list of files and its files differ, first in '1/more.so'"):
        load(copied)


def test_another_user_or_key_is_refused_and_a_shared_key_helps(copied, made, tmp_path, monkeypatch):
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "other"))
    with pytest.raises(ArtefactError, match=r"not signed by a key of this user.*set K31_CACHE_KEY"):
        load(copied)
    monkeypatch.setenv("K31_CACHE_KEY", "one secret of two machines")
    with pytest.raises(ArtefactError, match="not signed by a key of this user"):
        load(copied)
    monkeypatch.setenv("K31_CACHE_DIR", str(made.folder.parent / "third"))
    monkeypatch.delenv("K31_CACHE_KEY")


def test_what_is_signed_with_a_shared_key_travels(copied, tmp_path, monkeypatch):
    monkeypatch.setenv("K31_CACHE_KEY", "one secret of two machines")
    _remade(copied)
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "other"))
    x, weights = many_arguments(4)
    with torch.no_grad():
        load(copied)(x, weights)
    monkeypatch.setenv("K31_CACHE_KEY", "another secret of nobody")
    with pytest.raises(ArtefactError, match="not signed by a key of this user"):
        load(copied)


def test_owner_mode_and_links_are_checked(copied, tmp_path):
    copied.chmod(0o664)
    with pytest.raises(StoreError, match=r"can be written by others.*chmod go-w"):
        load(copied)
    copied.chmod(0o644)
    link = tmp_path / "link.k31"
    link.symlink_to(copied)
    with pytest.raises(ArtefactError, match=r"it is a symbolic link.*give the path of the file"):
        load(link)
    with pytest.raises(ArtefactError, match="there is no such file"):
        load(tmp_path / "none.k31")
    with pytest.raises(ArtefactError, match="it is no file"):
        load(tmp_path)


def test_other_or_missing_weights_are_refused(copied, tmp_path):
    file = copied.with_suffix(".safetensors")
    tensors, whole = load_file(file), file.read_bytes()
    load(copied)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1}, file)
    with pytest.raises(ArtefactError, match="the weights are not those that it was made with"):
        load(copied)
    file.unlink()
    (tmp_path / "moved.safetensors").write_bytes(whole)
    _forget_places(copied)
    with pytest.raises(ArtefactError, match=r"weights many.safetensors are not there.*weights=FILE_OR_DIR"):
        load(copied)
    load(copied, weights=tmp_path / "moved.safetensors")
    with pytest.raises(ArtefactError, match="not there"):
        load(copied, weights=tmp_path / "none")


def _forget_places(path):
    _rewritten(path, lambda name, data: b"{}" if name == "places.json" else data)


def test_weights_are_hashed_again_when_the_file_changes_and_only_then(copied, monkeypatch):
    from k31compile.cache.artefact import weight_files

    load(copied)
    asked = []
    monkeypatch.setattr(weight_files, "sha256_of", lambda path: asked.append(path) or "0" * 64)
    load(copied)
    assert asked == []
    file = copied.with_suffix(".safetensors")
    os.utime(file, ns=(1, 1))
    with pytest.raises(ArtefactError, match="the weights are not those"):
        load(copied)
    assert asked == [file.resolve()]


def test_a_forged_record_of_hashes_is_not_believed(copied):
    from k31compile.store import cache_dir

    load(copied)
    record = cache_dir() / "artefacts" / "hashes.json"
    signature, _, text = record.read_bytes().partition(b"\n")
    file = copied.with_suffix(".safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    info = file.stat()
    forged = json.loads(text)
    right = forged[str(file)][-1]
    forged[str(file)] = [info.st_size, info.st_mtime_ns, info.st_ino, info.st_dev, info.st_ctime_ns, right]
    record.write_bytes(signature + b"\n" + json.dumps(forged, sort_keys=True).encode())
    with pytest.raises(ArtefactError, match="the weights are not those"):
        load(copied)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"machine": {"torch": "9.9"}}, "made for torch 9.9, here it is"),
        ({"machine": {"vectors": "AVX9"}}, "made for vectors AVX9, here it is"),
        ({"machine": {"instructions": ["avx9"]}}, "made for a processor with avx9, which this one has not"),
        ({"kernels": "0"}, "kernels of another version of k31compile"),
        ({"operators": {"nobody::op.default": "x"}}, "the operator nobody::op.default is not registered here"),
        ({"operators": {"aten::relu.default": "x"}}, "it had x"),
    ],
)
def test_what_was_made_for_another_machine_is_refused(copied, changed, told):
    if "machine" in changed:
        changed = {"machine": {**flags.machine(), **changed["machine"]}}
    _remade(copied, **changed)
    with pytest.raises((ArtefactError, StoreError)) as caught:
        load(copied)
    assert told in str(caught.value)


def test_what_is_unpacked_is_checked_and_made_again(copied, own_cache):
    load(copied)
    opened = container.open_artefact(copied)
    folder = own_cache / "artefacts" / opened.digest[:32]
    library = folder / "0" / "library.so"
    whole = library.read_bytes()
    library.unlink()  # what this process has loaded stays as it is
    library.write_bytes(whole[:-1])
    library.chmod(0o600)
    load(copied)
    assert library.read_bytes() == whole
    (folder / "0" / "extra.so").write_bytes(b"")
    load(copied)
    assert not (folder / "0" / "extra.so").exists()
    assert [path for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_without_a_cache_folder_a_temporary_one_serves(copied, tmp_path, monkeypatch):
    monkeypatch.setenv("K31_CACHE_KEY", "one secret of two machines")
    _remade(copied)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "file" / "cache"))
    x, weights = many_arguments(4)
    with torch.no_grad():
        assert load(copied)(x, weights).shape == (2, 4)
