"""options={"lock": path}: each graph is held to the contract when it is compiled."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import k31compile
from k31compile.cli import app
from k31compile.report import last_report

STACK = Path(__file__).parent / "stack.py"


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lock") / "k31.lock"
    assert app.run(["explain", f"{STACK}:entry", "--lock", str(path), "--json"]) == 0
    return path


def run(model: torch.nn.Module, x: torch.Tensor, lock: Path, **more: Any) -> str:
    """The first line of the error that compiling under the contract gives; empty where it is kept."""
    torch._dynamo.reset()
    options = {"codegen": "ops", "lock": lock, **more}
    try:
        with torch.no_grad():
            torch.compile(model, backend="k31", options=options, dynamic=False)(x)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        return str(error.inner_exception)
    return ""


def test_what_is_promised_is_held(stack: ModuleType, lock: Path) -> None:
    assert run(stack.Stack().eval(), stack.tokens(), lock) == ""
    said = run(stack.smooth().model, stack.tokens(), lock)
    assert said.startswith("K31-0602: stack: layers.3.indexer lost lightning_indexer (promised 1, found 0): ")
    assert "contract/stack.py:" in said
    assert "(and " in said
    assert "\n" not in said


def test_the_report_of_a_broken_contract_is_kept(stack: ModuleType, lock: Path) -> None:
    run(stack.smooth().model, stack.tokens(), lock)
    assert last_report().fused["lightning_indexer"] == 3


@pytest.mark.slow
def test_another_length_is_held_to_the_counts_and_said(stack: ModuleType, lock: Path) -> None:
    assert run(stack.Stack().eval(), stack.tokens(27), lock) == ""
    assert any("no graph of the contract" in note and "float32[2, 27, 24]" in note for note in last_report().notes)
    assert "lost lightning_indexer" in run(stack.smooth().model, stack.tokens(27), lock)
    assert "no graph of the contract" in run(stack.Stack().eval(), stack.tokens(27), lock, strict=True)


def test_a_graph_that_is_handed_over_has_lost_everything(stack: ModuleType, lock: Path) -> None:
    model = stack.Stack().eval()
    with pytest.raises(Exception, match=r"lost lightning_indexer .*: k31 compiles for inference"):
        torch.compile(model, backend="k31", options={"codegen": "ops", "lock": str(lock)})(stack.tokens())


def test_a_part_of_the_model_says_what_it_has_nothing_of(stack: ModuleType, lock: Path) -> None:
    said = run(stack.split().model, stack.tokens(), lock)
    assert "lost lightning_indexer (promised 1, found 0): nothing of that layer was compiled here" in said


def test_a_missing_contract_is_one_line(stack: ModuleType, tmp_path: Path) -> None:
    said = run(stack.Stack().eval(), stack.tokens(), tmp_path / "none.lock")
    assert said.startswith("K31-0603: there is no fusion contract")
    assert k31compile.reports()
