"""A library that a killed compiler left half-written is taken away; one that is being built, or is whole, stays."""

import subprocess
import sys

import pytest
import torch
from filelock import FileLock

from k31compile.targets.unfinished import remove_unfinished_builds


def a_cache(folder, marked):
    (folder / "locks").mkdir(parents=True)
    place = folder / "ab"
    place.mkdir()
    for name in ("abkey.main.cpp", "abkey.main.so"):
        (place / name).write_text("half")
    if marked:
        (place / "abkey.main_CxxBuild").mkdir()
    return place / "abkey.main.so"


def test_what_was_never_finished_goes_and_its_source_stays(tmp_path):
    library = a_cache(tmp_path, marked=True)
    assert remove_unfinished_builds(tmp_path) == [library]
    assert [path.name for path in library.parent.iterdir()] == ["abkey.main.cpp"]


def test_what_is_whole_stays(tmp_path):
    library = a_cache(tmp_path, marked=False)
    assert remove_unfinished_builds(tmp_path) == []
    assert library.read_text() == "half"


def test_what_somebody_builds_stays(tmp_path):
    library = a_cache(tmp_path, marked=True)
    with FileLock(tmp_path / "locks" / "abkey.lock"):
        assert remove_unfinished_builds(tmp_path) == []
    assert library.exists()
    assert (library.parent / "abkey.main_CxxBuild").is_dir()


def test_no_cache_is_no_error(tmp_path):
    assert remove_unfinished_builds(tmp_path / "none") == []


HALF = """
import os, sys, torch
os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
f = torch.compile(lambda x: x.sin() + 1)
print(float(f(torch.zeros(3))[0]))
"""


@pytest.mark.slow
def test_inductor_is_right_again_after_a_compiler_was_killed(tmp_path):
    """The layout that the removal relies on is that of torch: a real library, cut short as a kill leaves it."""
    command = [sys.executable, "-P", "-c", HALF, str(tmp_path)]

    def compiled():
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert compiled().stdout.strip() == "1.0"
    for library in tmp_path.glob("*/*.main.so"):
        library.write_bytes(b"")
        library.with_name(library.name.removesuffix(".so") + "_CxxBuild").mkdir()
    assert "file too short" in compiled().stderr, torch.__version__
    assert remove_unfinished_builds(tmp_path)
    assert compiled().stdout.strip() == "1.0"
