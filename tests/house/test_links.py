"""The four links at the top are for people; imported by their short names they must refuse."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["passes", "kernels", "model", "cache"])
def test_a_link_leads_to_its_folder_and_refuses_its_short_name(name: str) -> None:
    assert (ROOT / name).is_symlink()
    assert (ROOT / name).resolve() == ROOT / "k31compile" / name
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError")
    assert f"k31compile.{name}" in last
