"""A call of the user's model inside a command: an error of the user's own is one line, and torch's log waits for it."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import k31compile
from k31compile.cli import console
from k31compile.errors import CallError, K31Error

if TYPE_CHECKING:
    from k31compile.entry import Entry

_LIMIT = "recompile_limit"


@contextmanager
def calling(entry: Entry) -> Iterator[list[str]]:
    """Call an entry's model, compiled, inside the block; gives the notes that torch's log is worth, at its end.

    Raises:
        CallError: the block failed, and the model as written fails too.
    """
    notes: list[str] = []
    with _held_log() as records:
        try:
            yield notes
        except K31Error:
            raise
        except Exception as error:
            own = _error_as_written(entry)
            if own is None:
                raise
            records.clear()
            raise _told(entry, own) from error
        finally:
            notes += _of_limit(records)


def _error_as_written(entry: Entry) -> Exception | None:
    try:
        entry.call()
    except Exception as error:
        return error
    return None


def _told(entry: Entry, error: Exception) -> CallError:
    return CallError(f"{entry.name} fails as it is written: {console.in_one_line(error)}", where=_place(error))


def _place(error: Exception) -> str:
    """The last line of the user's own code that an error came through, if any."""
    import torch

    others = tuple(str(Path(package.__file__ or "").parent) + os.sep for package in (torch, k31compile))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*others, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


@contextmanager
def _held_log() -> Iterator[list[tuple[logging.Handler, logging.LogRecord]]]:
    """Hold back what torch logs inside the block, and let out at its end what is still in the list."""
    held: list[tuple[logging.Handler, logging.LogRecord]] = []
    filters = [(handler, _holder(handler, held)) for handler in _handlers_of_torch()]
    for handler, hold in filters if not console.debug_wanted() else ():
        handler.addFilter(hold)
    try:
        yield held
    finally:
        for handler, hold in filters:
            handler.removeFilter(hold)
        for handler, record in held:
            handler.handle(record)


def _holder(handler: logging.Handler, held: list[tuple[logging.Handler, logging.LogRecord]]) -> logging.Filter:
    class Hold(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            held.append((handler, record))
            return False

    return Hold()


def _handlers_of_torch() -> list[logging.Handler]:
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    found = [handler for name in names for handler in logging.getLogger(name).handlers]
    return list(dict.fromkeys(found))


def _of_limit(records: list[tuple[logging.Handler, logging.LogRecord]]) -> list[str]:
    """Take Dynamo's warnings of its recompile limit out of the records, as one note."""
    limits = [pair for pair in records if _LIMIT in pair[1].getMessage()]
    records[:] = [pair for pair in records if pair not in limits]
    if not limits:
        return []
    functions = "1 function" if len(limits) == 1 else f"{len(limits)} functions"
    return [f"{functions} met Dynamo's recompile limit: calls past it ran as they are written, outside of all graphs"]
