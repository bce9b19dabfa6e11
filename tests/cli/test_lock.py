"""A fusion contract from outside: written, held, broken by one refactoring, renewed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]
RunJson = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("stack") / "stack.py"
    shutil.copy(Path(__file__).parents[1] / "contract" / "stack.py", path)
    return str(path)


@pytest.fixture
def lock(tmp_path: Path, stack: str, k31: Run) -> str:
    path = tmp_path / "k31.lock"
    code, out, _ = k31("explain", f"{stack}:entry", "--lock", str(path))
    assert code == 0
    assert f"written: {path}" in out
    return str(path)


def test_a_refactoring_that_loses_one_fusion_fails_with_layer_reason_and_line(
    lock: str, stack: str, k31: Run, k31_json: RunJson
) -> None:
    code, out, _ = k31("check", f"{stack}:entry", "--lock", lock)
    assert code == 0
    assert "every promise is kept" in out
    code, out, err = k31("check", f"{stack}:smooth", "--lock", lock)
    assert code == 1
    lost = [line for line in out.splitlines() if "lost lightning_indexer" in line]
    line = next(i for i, text in enumerate(Path(stack).read_text().splitlines(), 1) if ".topk(TOPK" in text)
    assert len(lost) == 1
    assert lost[0].startswith(
        "stack: layers.3.indexer lost lightning_indexer (promised 1, found 0): the scores are not"
    )
    assert f"/stack.py:{line}); " in lost[0]
    assert "relu" in lost[0]
    assert "layers.0" not in out + err
    assert "more than the" in out
    assert err.splitlines()[-1].startswith("K31-0602: 4 promises of the contract are not kept")
    code, data = k31_json("check", f"{stack}:smooth", "--lock", lock)
    assert (code, data["ok"]) == (1, False)
    (entry,) = data["entries"].values()
    assert {loss["name"] for loss in entry["losses"]} == {"indexer_prolog", "lightning_indexer", "static_top_k"}
    assert {loss["layer"] for loss in entry["losses"]} == {"layers.3.indexer"}
    assert entry["growths"][0]["found"] > entry["growths"][0]["promised"] > 0


@pytest.mark.slow
def test_what_is_gained_is_told_and_a_renewal_holds_it(tmp_path: Path, stack: str, k31: Run) -> None:
    lock = str(tmp_path / "k31.lock")
    assert k31("explain", f"{stack}:smooth", "--lock", lock)[0] == 0
    code, out, _ = k31("check", f"{stack}:entry", "--lock", lock)
    assert code == 0
    assert "note: stack: gained: 1 x lightning_indexer in layers.3.indexer" in out
    assert f"renew it: k31 explain {stack}:entry --lock {lock}" in out
    before = Path(lock).read_text()
    assert k31("explain", f"{stack}:entry", "--lock", lock)[0] == 0
    assert Path(lock).read_text() != before
    assert k31("check", f"{stack}:smooth", "--lock", lock)[0] == 1


def test_a_graph_break_alone_loses_nothing(lock: str, stack: str, k31_json: RunJson) -> None:
    code, data = k31_json("check", f"{stack}:split", "--lock", lock)
    assert (code, data["ok"]) == (0, True)
    assert any("memory was not compared" in note for note in data["notes"])


def test_wrong_files_are_one_line_and_2(lock: str, stack: str, tmp_path: Path, k31: Run) -> None:
    code, _, err = k31("check", f"{stack}:other", "--lock", lock)
    assert code == 2
    assert "K31-0603: the contract is for " in err
    assert "has no 'another'" in err
    code, _, err = k31("check", f"{stack}:entry", "--lock", str(tmp_path / "none"))
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no fusion contract" in err
    code, _, err = k31("explain", f"{stack}:entry", "--lock", str(tmp_path / "no" / "folder"))
    assert code == 2
    assert "there is no folder" in err


@pytest.mark.slow
def test_other_versions_are_told(lock: str, stack: str, k31_json: RunJson) -> None:
    text = Path(lock).read_text()
    Path(lock).write_text(text.replace('torch = "2.13.0"', 'torch = "2.1.0"'))
    assert Path(lock).read_text() != text
    code, data = k31_json("check", f"{stack}:entry", "--lock", lock)
    assert code == 0
    assert data["notes"] == ["the contract was written with torch 2.1.0, here is 2.13.0"]
