"""What all commands share: where they print, how they fail, how they show progress."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from k31compile.errors import K31Error

_EVERY = 5.0  # seconds between plain lines of progress
_PLAIN_WIDTH = 140  # of tables in a file or a pipe, where nobody knows a width


@dataclass
class _Flags:
    json: bool = False
    debug: bool = False


_flags = _Flags()


def take_flags(arguments: Sequence[str]) -> list[str]:
    """Take --json and --debug out of a command line, wherever they stand before a bare ``--``."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    ours = arguments[:split]
    _flags.json, _flags.debug = "--json" in ours, "--debug" in ours
    return [argument for argument in ours if argument not in ("--json", "--debug")] + list(arguments[split:])


def json_wanted() -> bool:
    """Tell whether this command was asked for JSON."""
    return _flags.json


def debug_wanted() -> bool:
    """Tell whether this command was asked for tracebacks."""
    return _flags.debug


def output() -> Console:
    """Return the console of results: standard output; `:one:` in it is part of a name, and no picture."""
    if sys.stdout.isatty():
        return Console(emoji=False)
    return Console(emoji=False, soft_wrap=True, width=int(os.environ.get("COLUMNS", "0")) or _PLAIN_WIDTH)


def table(*heads: str) -> Table:
    """Return an empty table whose cells are folded, never cut, where the terminal is narrow."""
    made = Table()
    for head in heads:
        made.add_column(head, overflow="fold")
    return made


def errors() -> Console:
    """Return the console of errors and progress: standard error."""
    return Console(stderr=True, emoji=False, soft_wrap=True, highlight=False)


def emit(data: Mapping[str, Any], render: Callable[[Console], None]) -> None:
    """Print a result: as one JSON document when asked for, else as ``render`` writes it."""
    if _flags.json:
        print(json.dumps(data, indent=2, sort_keys=True))
    else:
        render(output())


def fail(error: Exception) -> int:
    """Print one line that says what is wrong and what to do, and return the exit code."""
    if _flags.debug:
        errors().print_exception()
    known = error if isinstance(error, K31Error) else _unexpected(error)
    if _flags.json:
        print(json.dumps({"error": known.to_dict()}, indent=2, sort_keys=True))
    said = "\n".join(printable(line) for line in str(known).split("\n"))
    errors().print(said, style="red", markup=False)
    return known.exit_code


def _unexpected(error: Exception) -> K31Error:
    return K31Error(in_one_line(error), hint="run it again with --debug for the traceback")


def printable(text: str) -> str:
    """Text from a file that others wrote, without what would move a terminal's cursor or change its colours."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def in_one_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def write_anything() -> None:
    """Let every text be printed: what a terminal's or a pipe's encoding does not have stands as its escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Make a closed standard output harmless, as when a reader such as ``head`` has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show progress over ``total`` steps: a bar on a terminal, one plain line a step elsewhere.

    The block gets a function to be called with the name of each step as it begins.
    """
    console = errors()
    if not console.is_terminal:
        done = 0

        def line(step: str) -> None:
            nonlocal done
            done += 1
            console.print(f"{title}: {done}/{total} {step}", markup=False)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        begun = False

        def advance(step: str) -> None:
            nonlocal begun
            bar.update(task, description=f"{title}: {step}", advance=1 if begun else 0)
            begun = True

        yield advance


@contextlib.contextmanager
def waiting(title: str) -> Iterator[Callable[[str], None]]:
    """Show that something long goes on: a spinner on a terminal, a plain line every few seconds elsewhere.

    The block gets a function to be called often, with what is going on.
    """
    console = errors()
    if console.is_terminal:
        with console.status(title) as status:
            begin = time.monotonic()
            yield lambda text: status.update(f"{title}: {escape(text)}, {time.monotonic() - begin:.0f} s")
        return
    begin = time.monotonic()
    said, next_line = "", 0.0

    def line(text: str) -> None:
        nonlocal said, next_line
        spent = time.monotonic() - begin
        if text != said or spent >= next_line:
            console.print(f"{title}: {text}, {spent:.0f} s", markup=False)
            said, next_line = text, spent + _EVERY

    yield line
