"""The command that counts says by its exit code what its table shows."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers", reason="extra hf is not installed")
PATH = Path(__file__).parents[2] / "benchmarks" / "transformers_counts.py"


@pytest.fixture
def counts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_counts", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ALL, WANTING = {"KDA": (2, 2), "router": (1, 1)}, {"KDA": (1, 2), "router": (1, 1)}
CASES = {
    "all there": (ALL, 0, True, 0),
    "one missing": (WANTING, 0, True, 1),
    "a graph break": (ALL, 1, True, 1),
    "other tokens": (ALL, 0, False, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_exit_code(
    name: str, counts: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    parts, breaks, equal, code = CASES[name]
    monkeypatch.setattr(
        counts, "measure", lambda m, c: [counts.Row(m, c, g, parts, breaks, equal) for g in counts.CALLS[c]]
    )
    monkeypatch.setattr("sys.argv", ["transformers_counts.py", "--json"])
    assert counts.main() == code
    data = json.loads(capsys.readouterr().out)
    assert data["complete"] is (code == 0)
    assert len(data["rows"]) == 14


def test_a_graph_too_few_is_not_complete(
    counts: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(counts, "measure", lambda m, c: [counts.Row(m, c, "prefill", ALL, 0, True)])
    monkeypatch.setattr("sys.argv", ["transformers_counts.py"])
    assert counts.main() == 1
    assert "8 of 14 graphs complete" in capsys.readouterr().out


def test_a_wrong_word_is_told(counts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["transformers_counts.py", "all"])
    assert counts.main() == 2
