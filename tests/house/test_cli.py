"""The command as such: exit codes, one-line errors, flags anywhere, no torch before it is needed."""

import json
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from k31compile.cli import app, console
from k31compile.errors import TargetError

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from k31compile.cli import app
app.build_app()
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int | None]], None]:
    """Return a function that adds a command of the name ``probe``."""

    def add(function: Callable[..., int | None]) -> None:
        module = types.ModuleType("probe_command")
        module.probe = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "probe_command", module)
        monkeypatch.setitem(app.COMMANDS, "probe", "probe_command:probe")

    return add


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in app.COMMANDS)
    assert "--json" in text
    assert "--debug" in text


def test_no_command_needs_torch_to_be_listed() -> None:
    assert subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=False).returncode == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["doktor"], "K31-0103: there is no command 'doktor'; did you mean 'doctor'? commands: "),
        (["doctor", "--foo"], "K31-0103: No such option: --foo; see `k31 doctor --help`"),
        (["doctor", "extra"], "K31-0103: Got unexpected extra argument"),
        (["new-pass"], "K31-0102: the command 'new-pass' is not built yet; commands: "),
    ],
)
def test_wrong_use_is_one_line_and_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(argv) == 2
    assert one_line(capsys).startswith(says)


def test_failed_work_is_one_line_and_1(
    command: Callable[[Callable[..., int | None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise TargetError("no NPU [here]", where="ascend-a3", hint="use cpu")

    command(refuse)
    assert app.run(["probe"]) == 1
    assert one_line(capsys) == "K31-0401: no NPU [here] (ascend-a3); use cpu"
    assert app.run(["--json", "probe"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "K31-0401"


def test_a_traceback_only_with_debug(
    command: Callable[[Callable[..., int | None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def crash() -> None:
        raise ZeroDivisionError("by zero")

    command(crash)
    assert app.run(["probe"]) == 1
    assert one_line(capsys) == "K31-0001: ZeroDivisionError: by zero; run it again with --debug for the traceback"
    assert app.run(["probe", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_of_an_unexpected_error_only_the_first_line_is_told() -> None:
    assert console.in_one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert console.in_one_line(ValueError()) == "ValueError"


def test_a_result_is_text_or_one_json_document(
    command: Callable[[Callable[..., int | None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        with console.progress("work", 2) as advance:
            advance("a")
            advance("b")
        console.emit({"n": 3}, lambda out: out.print("three"))
        return 1

    command(work)
    assert app.run(["probe"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "three\n"
    assert captured.err.splitlines() == ["work: 1/2 a", "work: 2/2 b"]
    assert app.run(["probe", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"n": 3}


def test_flags_after_a_bare_double_dash_are_the_commands_own() -> None:
    assert console.take_flags(["a", "--json", "--", "--debug"]) == ["a", "--", "--debug"]
    assert console.json_wanted()
    assert console.take_flags(["a"]) == ["a"]
    assert not console.json_wanted()
