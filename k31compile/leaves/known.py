"""What is known of functions: confirmed forms and refusals, by digest, in this process and in the user's store.

One small JSON file a function. It holds names, numbers and shapes, never code: a call is rebuilt from it by the
operators of this version, and checked by running it once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from k31compile.errors import StoreError
from k31compile.leaves.form import Form
from k31compile.leaves.source import Source
from k31compile.store import atomic_write, cache_dir, check_private

log = logging.getLogger("k31compile")

_MOST_FILES = 512
_FORMAT = 1


@dataclass
class Knowledge:
    """Of one function: call key -> its confirmed forms, and call key -> why it was refused."""

    forms: dict[str, list[Form]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    stored: bool = False


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
            read = _read(_path(source))
            if read is not None:
                known.forms = {**read.forms, **known.forms}
                known.refused = {**read.refused, **known.refused}
        return known

    def keep(self, source: Source) -> None:
        """Write down what is known of a function."""
        known = self._of[identity(source)]
        body = {
            "forms": {key: [form.to_dict() for form in forms] for key, forms in known.forms.items()},
            "refused": known.refused,
        }
        text = json.dumps(body, sort_keys=True)
        data = {"format": _FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}
        try:
            path = _path(source)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            atomic_write(path, json.dumps(data, sort_keys=True, indent=1).encode())
            _keep_newest(path.parent)
        except (StoreError, OSError) as error:
            log.warning("what was learned of %s could not be kept: %s", source.functions[0].__name__, error)

    def names(self) -> set[str]:
        """The names under which functions were learned: where to look, which is not whom to believe."""
        try:
            return {path.name.rpartition("-")[0] for path in _folder().glob("*.json")}
        except (StoreError, OSError):
            return set()

    def has_file(self, source: Source) -> bool:
        """Whether an earlier process learned this very function."""
        try:
            return _path(source).exists()
        except (StoreError, OSError):
            return False

    def forget(self) -> None:
        """Forget what this process knows; files stay."""
        self._of.clear()


KNOWN = Known()


def identity(source: Source) -> str:
    """A hash of a function and of all that a confirmation of it rests on."""
    return hashlib.sha256(f"{source.digest}|{_surroundings()}".encode()).hexdigest()


@functools.cache
def _surroundings() -> str:
    """torch, Python and our own code that confirms, by content."""
    root = Path(__file__).parents[1]
    folders = ("graph", "kernels", "leaves", "passes/recognise")
    files = sorted(
        path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h")
    )
    contents = hashlib.sha256()
    for file in files:
        contents.update(file.read_bytes())
    return f"{_FORMAT} {torch.__version__} {sys.version_info[:2]} {contents.hexdigest()}"


def _folder() -> Path:
    return cache_dir() / "functions"


def _path(source: Source) -> Path:
    return _folder() / f"{source.functions[0].__code__.co_name}-{identity(source)[:32]}.json"


def _read(path: Path) -> Knowledge | None:
    """What a file holds; a file that is not as it was written is named and left alone."""
    try:
        if not path.exists():
            return None
        check_private(path)
        data: Any = json.loads(path.read_text())
        text = json.dumps(data["body"], sort_keys=True)
        if data["format"] != _FORMAT or hashlib.sha256(text.encode()).hexdigest() != data["sha256"]:
            raise ValueError("its contents do not have the hash that it gives")
        forms = {key: [Form.from_dict(form) for form in forms] for key, forms in data["body"]["forms"].items()}
        return Knowledge(forms, {str(key): str(why) for key, why in data["body"]["refused"].items()})
    except (StoreError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is not used, its function is confirmed anew: %s", path, error)
        return None


def _keep_newest(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[_MOST_FILES:]:
        with contextlib.suppress(OSError):
            path.unlink()
