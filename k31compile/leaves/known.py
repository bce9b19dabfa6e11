"""What is known of functions: confirmed forms and refusals, by digest, in this process and in the user's store.

One small signed file a function. It holds names, numbers and shapes, never code: a call is rebuilt from it by the
operators of this version. Whose digest and signature are right is believed without being run again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k31compile.errors import StoreError
from k31compile.graph.surroundings import situation, surroundings
from k31compile.leaves.form import Form
from k31compile.leaves.source import Source
from k31compile.signed_file import (
    FILE_NAMES,
    keep_newest,
    private_folder,
    read_signed,
    require_keys,
    sound_bodies,
    touch,
    write_signed,
)

log = logging.getLogger("k31compile")

FOLDER = "functions"
_MOST_FILES, _MOST_BYTES = 512, 16 << 20
_FORMAT = 2
_SOURCES = ("graph", "kernels", "leaves", "passes/recognise")
_NAME = re.compile(f"{FOLDER}/{FILE_NAMES[FOLDER]}")


@dataclass
class Knowledge:
    """Of one function: call key -> its confirmed forms, and call key -> why it was refused."""

    forms: dict[str, list[Form]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    stored: bool = False

    def to_bytes(self, key: str) -> bytes:
        """The body of the file of the function with this identity."""
        forms = {call: [form.to_dict() for form in forms] for call, forms in self.forms.items()}
        body = {"format": _FORMAT, "function": key, "forms": forms, "refused": self.refused}
        return json.dumps(body, sort_keys=True, indent=1).encode()

    def take(self, other: Knowledge) -> None:
        """Add what this does not know yet."""
        for call, forms in other.forms.items():
            mine = self.forms.setdefault(call, [])
            mine.extend(form for form in forms if form not in mine)
        self.refused = {**other.refused, **self.refused}


class Known:
    """Everything that this process knows of functions; `stored` whether it reads and writes files, too."""

    def __init__(self) -> None:
        self._of: dict[str, Knowledge] = {}

    def of(self, source: Source, stored: bool) -> Knowledge:
        """What is known of a function; from its file where this process has not seen it yet."""
        key = identity(source)
        known = self._of.setdefault(key, Knowledge())
        if stored and not known.stored:
            known.stored = True
            known.take(_read(_file_name(source), key))
        return known

    def keep(self, source: Source) -> None:
        """Write down what is known of a function; of an opaque one no refusal, which may not hold the next time."""
        key = identity(source)
        known = self._of[key]
        kept = Knowledge(known.forms) if source.is_opaque else known
        try:
            folder = _folder()
            write_signed(folder / _file_name(source), kept.to_bytes(key))
            keep_newest(folder, "*.signed", _MOST_FILES, _MOST_BYTES)
        except (StoreError, OSError) as error:
            log.warning("what was learned of %s could not be kept: %s", source.functions[0].__name__, error)

    def names(self) -> set[str]:
        """The names under which functions were learned: where to look, which is not whom to believe."""
        try:
            return {path.name.rpartition("-")[0] for path in _folder().glob("*.signed")}
        except (StoreError, OSError):
            return set()

    def has_file(self, source: Source) -> bool:
        """Whether an earlier process learned this very function."""
        try:
            return (_folder() / _file_name(source)).exists()
        except (StoreError, OSError):
            return False

    def look_again(self, key: str) -> None:
        """Read the file of this identity anew when it is next asked for."""
        if key in self._of:
            self._of[key].stored = False

    def forget(self) -> None:
        """Forget what this process knows; files stay."""
        self._of.clear()


KNOWN = Known()


def identity(source: Source) -> str:
    """A hash of a function and of all that a confirmation of it rests on."""
    return hashlib.sha256(f"{source.digest}|{_surroundings()}|{situation()}".encode()).hexdigest()


def exported() -> Iterator[tuple[str, bytes]]:
    """What is known of functions, for a bundle: file names below the cache folder, contents without signatures."""
    yield from sound_bodies(_folder(), FOLDER)


def imported(name: str, body: bytes) -> None:
    """Take what another machine exported; whoever calls has verified that it may be believed.

    Forms that are here already stay.

    Raises:
        StoreError: it is not what `exported` gives.
    """
    found = _NAME.fullmatch(name)
    try:
        key, theirs = _parsed(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"holds no confirmed function: {error}", where=name, hint="export it again") from None
    if found is None or not key.startswith(found[2]):
        raise StoreError("is not named after the function that it holds", where=name, hint="export it again")
    file_name = name.removeprefix(f"{FOLDER}/")
    known = _read(file_name, key)
    known.take(theirs)
    write_signed(_folder() / file_name, known.to_bytes(key))
    KNOWN.look_again(key)


@functools.cache
def _surroundings() -> str:
    return f"{_FORMAT} {surroundings(_SOURCES)}"


def _folder() -> Path:
    return private_folder(FOLDER)


def _file_name(source: Source) -> str:
    return f"{source.functions[0].__code__.co_name}-{identity(source)[:40]}.signed"


def _parsed(body: bytes) -> tuple[str, Knowledge]:
    data: Any = json.loads(body)
    require_keys(data, {"format": int, "function": str, "forms": dict, "refused": dict})
    if data["format"] != _FORMAT or not re.fullmatch("[0-9a-f]{64}", data["function"]):
        raise ValueError("it is of another format")
    forms = {str(call): [Form.from_dict(form) for form in forms] for call, forms in data["forms"].items()}
    return data["function"], Knowledge(forms, {str(call): str(why) for call, why in data["refused"].items()})


def _read(file_name: str, key: str) -> Knowledge:
    """What a file holds; one that cannot be believed is named, and its function confirmed anew."""
    path: Path | None = None
    try:
        path = _folder() / file_name
        body = read_signed(path)
        if body is None:
            return Knowledge()
        found, known = _parsed(body)
        if found != key:
            raise ValueError("it is the file of another function")
    except (StoreError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is not used, its function is confirmed anew: %s", path or file_name, error)
        return Knowledge()
    touch(path)
    return known
