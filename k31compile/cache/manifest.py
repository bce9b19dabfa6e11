"""What an entry says about itself: one JSON text, the same bytes wherever and whenever it is made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from k31compile.errors import StoreError

FORMAT = 1
MANIFEST = "manifest.json"
SIGNATURE = "signature"

_KEY = re.compile(r"[0-9a-f]{16,128}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def is_key(text: str) -> bool:
    """Tell whether a text can be the key of an entry: 16 to 128 hexadecimal digits."""
    return _KEY.fullmatch(text) is not None


def is_payload_name(name: str) -> bool:
    """Tell whether a file of an entry may be called so: a plain name, and none of the two that every entry has."""
    return _FILE_NAME.fullmatch(name) is not None and name not in (MANIFEST, SIGNATURE)


def manifest_bytes(
    key: str,
    kind: str,
    ingredients: Mapping[str, str],
    program: Mapping[str, Any],
    report: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
) -> bytes:
    """Write a manifest down; StoreError names the part that is no plain JSON."""
    parts = {
        "format": FORMAT,
        "key": key,
        "kind": kind,
        "ingredients": dict(ingredients),
        "files": {name: dict(about) for name, about in files.items()},
        "program": dict(program),
        "report": dict(report),
    }
    wrong = [name for name, text in ingredients.items() if not isinstance(text, str)]
    if wrong:
        raise StoreError(f"the ingredient {wrong[0]!r} of an entry is no text", where=key, hint="write it as text")
    for name, part in parts.items():
        try:
            json.dumps(part, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"{name!r} of an entry is no plain JSON: {error}", where=key, hint="keep it plain"
            ) from None
    return (json.dumps(parts, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def parse(data: bytes) -> dict[str, Any]:
    """Read a manifest whose signature was checked; ValueError says what is not as it was written."""
    manifest = json.loads(data)
    if not isinstance(manifest, dict):
        raise ValueError("the manifest is no table")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"the manifest has format {manifest.get('format')!r}, this version reads {FORMAT}")
    shapes = {"key": str, "kind": str, "ingredients": dict, "files": dict, "program": dict, "report": dict}
    for name, shape in shapes.items():
        if not isinstance(manifest.get(name), shape):
            raise ValueError(f"the manifest has no {name!r}")
    for name, about in manifest["files"].items():
        if not is_payload_name(name) or not isinstance(about, dict) or set(about) != {"sha256", "bytes"}:
            raise ValueError(f"the manifest lists a file as {name!r} in a way that nobody writes")
    return manifest


def file_names(data: bytes) -> set[str]:
    """The names that a manifest lists, believed or not: enough to know what may be removed beside it."""
    try:
        files = json.loads(data)["files"]
        return {name for name in files if isinstance(name, str) and is_payload_name(name)}
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()
