"""Who may import whom: the order of the layers, and what the model may know."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "k31compile"

# Each layer imports only from itself and from those before it.
LAYERS = [
    {"cpu_isa", "errors", "options", "report", "report_view", "signatures", "signed_file", "store"},
    {"graph"},
    {"kernels"},
    {"passes"},
    {"targets"},
    {"timeline"},
    {"cache"},
    {"guard_filters", "loops", "notes", "skipped"},  # watch Dynamo and know nothing of ours
    {"leaves", "slices"},
    {
        "ahead",
        "backend",
        "captured",
        "compile_graph",
        "keeping",
        "contract",
        "entry",
        "explain",
        "check",
        "nested",
        "between_regions",
        "offline",
        "weights",
    },
    {"bucket_sizes", "buckets", "bundle", "counted", "padding"},
    {"onnx_export"},
    {"model"},  # outside of the order: it imports nothing of ours (below), and only commands and benchmarks use it
    {"bench"},
    {"cli", "__main__"},
    {"__init__"},  # the public face may name everything
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
FILES = sorted(PACKAGE.rglob("*.py"))
MODEL_FILES = sorted((PACKAGE / "model").rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def our_part(name: str) -> str | None:
    """Return the part of our package that an import reaches, or None for somebody else's."""
    head, *rest = name.split(".")
    if head != "k31compile":
        return None
    return rest[0] if rest and rest[0] in RANK else "__init__"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_stands_before_it(path: Path) -> None:
    own = part_of(path)
    assert own in RANK, f"{own} has no place in the order of layers; give it one in LAYERS"
    for line, name in imported(path):
        part = our_part(name)
        if part is None or part == own:
            continue
        if part == "__init__":  # the commands use the face; anybody else would go around the order through it
            assert own == "cli", f"{path}:{line}: import the module, not {name}"
            continue
        assert RANK[part] <= RANK[own], f"{path}:{line}: {own} must not import {name}"
        assert part != "model" or own in {"bench", "cli", "__init__"}, f"{path}:{line}: {own} must not know the model"


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_model_is_plain_pytorch(path: Path) -> None:
    allowed = {"torch", *sys.stdlib_module_names}
    if path.relative_to(PACKAGE) == Path("model/weights.py"):
        allowed |= {"safetensors"}
    for line, name in imported(path):
        ours = name.startswith("k31compile.model")
        assert ours or name.split(".")[0] in allowed, f"{path}:{line}: the model must not import {name}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in {"torch.ops", "torch.library", "torch.compile"}, f"{path}:{node.lineno}"


def test_the_rule_sees_a_violation() -> None:
    assert our_part("k31compile.passes.fusion.x") == "passes"
    assert our_part("k31compile.Report") == "__init__"
    assert our_part("torch.fx") is None
    assert RANK["passes"] > RANK["kernels"] > RANK["graph"] > RANK["errors"]
