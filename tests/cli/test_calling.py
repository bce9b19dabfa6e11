"""A model that fails as it is written is one line with the user's own error; torch's log waits for it."""

import logging
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from k31compile import Entry
from k31compile.cli.calling import calling

Process = Callable[..., CompletedProcess[str]]
LIMITED = "torch._dynamo hit config.recompile_limit (8)"


@pytest.mark.parametrize("command", [pytest.param("explain", marks=pytest.mark.slow), "check"])
def test_the_users_own_error_is_one_line_with_its_place(command: str, small: str, process: Process) -> None:
    done = process(command, f"{small}:ill_called")
    assert (done.returncode, done.stdout) == (1, "")
    progress, line = done.stderr.splitlines()
    assert progress == f"{command}: 1/1 ill"
    assert line.startswith("K31-0107: ill fails as it is written: RuntimeError: mat1 and mat2 shapes cannot be")
    assert "small_model.py:" in line
    assert line.endswith("repair the model or the arguments of its Entry; --debug shows the traceback")


@pytest.mark.slow
def test_a_traceback_of_it_only_with_debug(small: str, process: Process) -> None:
    done = process("explain", f"{small}:ill_called", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_what_fails_only_when_compiled_is_not_blamed_on_the_model() -> None:
    with pytest.raises(ZeroDivisionError), calling(Entry("fine", torch.relu, (torch.ones(2),))):
        raise ZeroDivisionError


def test_the_recompile_limit_is_a_note_and_other_warnings_are_let_out(monkeypatch: pytest.MonkeyPatch) -> None:
    out: list[str] = []

    class Out(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            out.append(record.getMessage())

    log: Any = logging.getLogger("torch._dynamo")
    monkeypatch.setattr(log, "handlers", [Out()])
    with calling(Entry("fine", torch.relu, (torch.ones(2),))) as notes:
        log.warning(LIMITED)
        log.warning("something else")
        assert out == []
    assert out == ["something else"]
    (note,) = notes
    assert note.startswith("1 function met Dynamo's recompile limit")
