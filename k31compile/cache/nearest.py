"""Which kept entry comes nearest to what was asked for, and in what they differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MOST_COMPARED = 256
"""So many of the entries used last are compared."""

_NAME = re.compile(r"[\w.]+")
_DIGEST = re.compile(r"[0-9a-f]{16,128}")
_MOST_CHARACTERS = 60
_MOST_NAMED = 4


@dataclass(frozen=True)
class Nearest:
    """The entry that differs in the fewest ingredients.

    Attributes:
        key: its key.
        kind: its kind.
        differing: ingredient -> what it is there and what it is here; "" where there is none of that name.

    """

    key: str
    kind: str
    differing: Mapping[str, tuple[str, str]]

    def sentence(self) -> str:
        """Say it in one line."""
        if not self.differing:
            return f"entry {self.key[:12]} has the same ingredients"
        parts = [describe(name, *pair) for name, pair in sorted(self.differing.items())]
        more = f" and {len(parts) - _MOST_NAMED} more" if len(parts) > _MOST_NAMED else ""
        return f"nearest entry {self.key[:12]}: {', '.join(parts[:_MOST_NAMED])}{more}"


def difference(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The ingredients that two keys do not share: name -> (there, here)."""
    names = sorted(there.keys() | here.keys())
    return {name: (there.get(name, ""), here.get(name, "")) for name in names if there.get(name) != here.get(name)}


def nearest_of(candidates: Iterable[tuple[str, str, Mapping[str, str]]], here: Mapping[str, str]) -> Nearest | None:
    """Of entries (key, kind, ingredients), best first among equals, the one that differs in the fewest ingredients.

    What has no ingredient of the same name is another kind of thing.
    """
    found = [
        Nearest(key, kind, difference(there, here)) for key, kind, there in candidates if there.keys() & here.keys()
    ]
    return min(found, key=lambda one: len(one.differing), default=None)


def describe(name: str, there: str, here: str) -> str:
    """Say how one ingredient differs: the first place where its two texts part, or only its name for digests."""
    if not there or not here:
        return f"{name} {'is missing' if not there else 'is'} there and {'is missing' if not here else 'is'} here"
    if _DIGEST.fullmatch(there) and _DIGEST.fullmatch(here):
        return f"{name} differ"
    one, other = _differing_options(there, here) or _first_difference(there, here)
    return f"{name} differ ({one} there, {other} here)"


def _differing_options(there: str, here: str) -> tuple[str, str] | None:
    """Where both texts are JSON tables: the first name that differs, with its value in each."""
    try:
        theirs, ours = json.loads(there), json.loads(here)
    except ValueError:
        return None
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return None
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if not names:
        return None
    return _short(f"{names[0]} {json.dumps(theirs.get(names[0]))}"), _short(json.dumps(ours.get(names[0])))


def _first_difference(there: str, here: str) -> tuple[str, str]:
    ours, theirs = here.splitlines(), there.splitlines()
    place = next((place for place, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
    if place is None:
        shorter = min(len(ours), len(theirs))
        return _short((theirs[shorter:] or ["nothing more"])[0]), _short((ours[shorter:] or ["nothing more"])[0])
    one, other = theirs[place], ours[place]
    head, _, rest = one.partition(" ")
    same, _, other_rest = other.partition(" ")
    if (
        head == same and _NAME.fullmatch(head) and rest and other_rest
    ):  # both speak of the same thing, which is named once
        return _short(f"{head} {rest}"), _short(other_rest)
    return _short(one), _short(other)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
