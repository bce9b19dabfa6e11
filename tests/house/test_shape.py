"""The shape of the code: small files, small functions, a docstring on every module, tests that run."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "k31compile").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("k31compile", "tests", "docs", "examples", "benchmarks", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.suffix in {".py", ".md", ".cpp", ".h", ".toml", ".json", ""}
) + sorted(path for path in ROOT.iterdir() if path.is_file() and path.name != ".git")
# Models in other people's manners: one file each, as they publish them.
OURS = [path for path in SOURCES + TESTS if path.parent != ROOT / "tests" / "strangers" / "whole"]
MAX_LINES = 400
MAX_FUNCTION = 80


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", OURS, ids=named)
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES, "split it: one thing a file"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"line {node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "begin it with a docstring"


@pytest.mark.parametrize("path", TESTS, ids=named)
def test_every_test_is_collected(path: Path) -> None:
    """A method of a Test class that pytest would pass by, and asserts that never run, are no tests."""
    if not path.name.startswith("test_"):
        return
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and any(isinstance(part, ast.Assert) for part in ast.walk(item)):
                    assert item.name.startswith(("test_", "_")), f"{item.name} is never run"


def test_nothing_names_a_machine_or_a_registry() -> None:
    private = re.compile(r"/(?:home|Users|root)/\w|://[\w.-]*(?:pypi|pythonhosted|debian)\.")
    found = [named(path) for path in TEXTS if private.search(path.read_text(errors="ignore"))]
    assert not found
