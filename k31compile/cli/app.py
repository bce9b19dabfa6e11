"""The table of commands, and the one place that runs them and turns every error into a line.

A command is a function in a module of its own. It takes its options, prints through
``k31compile.cli.console`` and returns its exit code (None is 0). Its module imports torch, and whatever
imports torch, inside functions only: help and ``doctor`` must work where torch does not.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import k31compile
from k31compile.cli import console
from k31compile.errors import K31Error, NotBuiltYetError, UsageError

COMMANDS = {
    "demo": "k31compile.cli.demo:demo",
    "explain": "k31compile.cli.explain:explain",
    "check": "k31compile.cli.check:check",
    "compile": "k31compile.cli.compile:compile",
    "run": "k31compile.cli.run:run",
    "export": "k31compile.cli.export:export",
    "weights": "k31compile.cli.weights:weights",
    "cache": "k31compile.cli.cache:cache",
    "bench": "k31compile.cli.bench:bench",
    "passes": "k31compile.cli.passes:passes",
    "doctor": "k31compile.cli.doctor:doctor",
}
"""Command name -> module:function or module:group of commands, in the order of ``k31 --help``."""

PLANNED = ("new-pass",)
"""Commands that the interface names and that are not built yet."""

_EPILOG = "Every command also takes --json (one JSON document on standard output) and --debug (a traceback)."


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    console.write_anything()
    arguments = console.take_flags(sys.argv[1:] if argv is None else argv)
    try:
        result = build_app(_chosen(arguments))(arguments or ["--help"], prog_name="k31", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        console.errors().print("stopped")
        return 1
    except BrokenPipeError:
        console.drop_output()
        return 1
    except Exception as error:
        return console.fail(_as_ours(error))
    return result if isinstance(result, int) else 0


def build_app(only: str | None = None) -> typer.Typer:
    """Return the application with all commands, or with one so that no other module is imported."""
    app = typer.Typer(name="k31", add_completion=False, rich_markup_mode=None, epilog=_EPILOG)

    @app.callback()
    def group(
        version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version)] = False,
    ) -> None:
        """Compile K3.1-style PyTorch models, and see what was fused and why."""

    for name in COMMANDS:
        if only in (None, name):
            command = _command(name)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, epilog=_EPILOG)
            else:
                app.command(name, epilog=_EPILOG)(command)
    return app


def _command(name: str) -> typer.Typer | Callable[..., Any]:
    module, _, function = COMMANDS[name].partition(":")
    command: typer.Typer | Callable[..., Any] = getattr(importlib.import_module(module), function)
    return command


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"k31compile {k31compile.__version__}")
        raise typer.Exit()


def _chosen(arguments: Sequence[str]) -> str | None:
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name is None or name in COMMANDS:
        return name
    listed = f"commands: {', '.join(COMMANDS)}"
    if name in PLANNED:
        raise NotBuiltYetError(f"the command {name!r} is not built yet", hint=listed)
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    raise UsageError(f"there is no command {name!r}", hint=guess + listed)


def _as_ours(error: Exception) -> Exception:
    # typer's own usage errors, whose class depends on whether typer brings its parser or imports it
    message = getattr(error, "format_message", None)
    if message is None or isinstance(error, K31Error):
        return error
    wrong = UsageError(str(message()).rstrip("."), hint=f"see `k31 {_context(error)}--help`")
    wrong.__cause__ = error
    return wrong


def _context(error: Exception) -> str:
    """The commands that an error is of, as they are written behind k31."""
    path = str(getattr(getattr(error, "ctx", None), "command_path", ""))
    return "".join(f"{name} " for name in path.split()[1:])
