"""How the C++ kernels come to be, are kept, and are replaced by the reference where they cannot be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k31compile.errors import BuildError
from k31compile.kernels.cpu import build, loader
from k31compile.signatures import local_key
from k31compile.store import cache_dir

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
REPORT = (
    "import torch, k31compile.kernels as k\n"
    "q = torch.randn(1, 2, 3, 4)\n"
    "torch.ops.k31.lightning_indexer(q, torch.randn(1, 9, 1, 4), q[..., 0], sparse_count=2)\n"
    "choice = k.provider_for('lightning_indexer')\n"
    "print(choice.provider, '|', choice.why)\n"
)


def start(cache, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "K31_CACHE_DIR": str(cache)} | variables
    return subprocess.Popen(
        [sys.executable, "-c", REPORT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process):
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    provider, _, why = output.strip().partition(" | ")
    return provider, why, errors


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("K31_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with one built variant, to be copied: a build takes seconds."""
    folder = tmp_path_factory.mktemp("built") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K31_CACHE_DIR", str(folder))
        build.built_library("portable")
    return folder


@pytest.fixture
def kept(built, cache):
    shutil.copytree(built, cache)
    return build.built_library("portable")


def test_without_a_compiler_the_reference_serves(tmp_path):
    provider, why, _ = finish(start(tmp_path / "cache", PATH="", CXX=""))
    assert provider == "reference"
    assert "no C++ compiler" in why


def test_switched_off(tmp_path):
    provider, why, _ = finish(start(tmp_path / "cache", K31_CPU_KERNELS="0"))
    assert provider == "reference"
    assert "K31_CPU_KERNELS=0" in why
    assert not (tmp_path / "cache").exists()


@needs_compiler
@pytest.mark.slow
def test_two_processes_at_once_both_succeed(tmp_path):
    racers = [start(tmp_path / "cache") for _ in range(2)]
    for racer in racers:
        provider, _, errors = finish(racer)
        assert provider == "cpu-fast"
        assert "Warning" not in errors
    names = sorted(path.name for path in (tmp_path / "cache" / "kernels").iterdir())
    assert len(names) == 1, names
    assert (tmp_path / "cache" / "signing.key").exists()


@needs_compiler
def test_the_second_time_nothing_is_built(kept, monkeypatch):
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    assert build.built_library("portable") == kept


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign key", "open to others"])
def test_a_library_that_cannot_be_trusted_is_set_aside(kept, damage):
    data = kept.read_bytes()
    if damage == "cut":
        kept.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        kept.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    elif damage == "empty":
        kept.write_bytes(b"")
    elif damage == "foreign key":
        (cache_dir() / "signing.key").write_bytes(b"0" * 32)
    else:
        kept.chmod(0o666)
    with pytest.warns(UserWarning, match="set aside"):
        again = build.built_library("portable")
    assert again == kept
    assert build._fault(kept, local_key()) is None
    assert kept.with_name(f"{kept.name}.broken").exists()


@needs_compiler
def test_a_folder_that_others_can_write_is_refused(kept):
    kept.parent.chmod(0o777)
    with pytest.raises(BuildError, match="written by others"):
        build.built_library("portable")


def test_the_key_names_everything_that_decides_the_bytes(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "instruction_set", lambda: "avx2")
    base = build.build_key("fast")
    others = [build.build_key("portable")]
    monkeypatch.setenv("CXX", "g++ -g")
    others.append(build.build_key("fast"))
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(build, "instruction_set", lambda: "avx512f")
    others.append(build.build_key("fast"))
    monkeypatch.setattr(build, "instruction_set", lambda: "avx2")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.13.1")
        others.append(build.build_key("fast"))
        assert build.build_key("portable") == others[0]  # which does not call torch
    monkeypatch.setattr(build, "sources", lambda: [])
    others.append(build.build_key("fast"))
    assert len({base, *others}) == 6


@needs_compiler
def test_what_was_built_is_found_without_a_compiler(kept, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert build.built_library("portable") == kept
    with pytest.raises(BuildError, match="no C\\+\\+ compiler on PATH"):
        build.built_library("wide")


def test_a_compiler_that_fails_is_quoted(cache, tmp_path, monkeypatch):
    script = tmp_path / "cxx"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: no such thing" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match=r"refused the kernels: x\.cpp:1: error: no such thing"):
        build.built_library()
    assert not list((cache / "kernels").glob("*.so"))


def test_the_compiler_is_what_the_environment_names(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    assert build.compiler() is None
    monkeypatch.setenv("CXX", f"{sys.executable} -O2")
    assert build.compiler() == [sys.executable, "-O2"]


def test_a_failure_is_remembered(monkeypatch):
    monkeypatch.setattr(loader, "_LOADED", {})
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setattr(build, "build_key", lambda variant: "0" * 32)
    first = loader.available()
    monkeypatch.undo()
    assert first[0] is False
    assert "no C++ compiler" in first[1]
