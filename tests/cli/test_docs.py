"""What the documents show is executed: the pass of docs/add-a-pass.md and the example of the README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNER = """
import sys
from k31compile import options

options.FUSIONS = (*options.FUSIONS, "double_relu")  # the one word that the page says to add
from example import *

for name, test in sorted(globals().items()):
    if name.startswith("test_"):
        test()
        print(name)
"""


def blocks(path: str, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall((ROOT / path).read_text()) if kind == language]


def test_the_pass_of_the_page_works_as_it_says(tmp_path: Path) -> None:
    the_pass, its_tests = blocks("docs/add-a-pass.md", "python")
    (tmp_path / "example.py").write_text(the_pass + its_tests)
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    done = subprocess.run([sys.executable, str(runner)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wanted = re.findall(r"^def (test_\w+)", its_tests, re.MULTILINE)
    assert done.stdout.split() == sorted(wanted)
    assert len(wanted) == 3


@pytest.mark.parametrize("path", ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))])
def test_every_link_leads_somewhere(path: str) -> None:
    page = ROOT / path
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_readme_shows_the_example_that_is_there() -> None:
    assert (ROOT / "examples" / "ten_lines.py").read_text() in blocks("README.md", "python")


def test_the_readme_lists_what_is_fused_and_what_is_not() -> None:
    from k31compile.options import FUSIONS, PLANNED_FUSIONS

    text = (ROOT / "README.md").read_text()
    fused = text.split("## What is fused today")[1].split("\n## ")[0]
    today, planned = fused.split("**Not yet**")
    assert all(f"`{name}`" in today for name in FUSIONS)
    assert all(f"`{name}`" in planned for name in PLANNED_FUSIONS)


@pytest.mark.slow
def test_the_readmes_output_is_real(tmp_path: Path) -> None:
    example = ROOT / "examples" / "ten_lines.py"
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout in blocks("README.md", "text")
