"""How much a store may hold, and who leaves first: what was set aside, then what was used longest ago."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from k31compile.cache.places import Places
from k31compile.cache.removal import Removed, remove_entry, size_of
from k31compile.cache.usage import Usage
from k31compile.errors import OptionError

MOST_BROKEN = 8
"""So many entries that were set aside are kept to be looked at."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_FUTURE_NS = 60 * 10**9


@dataclass(frozen=True)
class Limits:
    """The bounds of a store.

    Attributes:
        bytes: on the disk, all entries together; ``K31_CACHE_MAX_BYTES`` (``500M``), else 8 GiB.
        entries: how many; ``K31_CACHE_MAX_ENTRIES``, else 2000.
        files_per_entry: manifest and signature included.

    """

    bytes: int = field(default_factory=lambda: _from_environment("K31_CACHE_MAX_BYTES", 8 << 30))
    entries: int = field(default_factory=lambda: _from_environment("K31_CACHE_MAX_ENTRIES", 2000))
    files_per_entry: int = 5

    def __post_init__(self) -> None:
        for name, value in (("bytes", self.bytes), ("entries", self.entries)):
            if value < 1:
                raise OptionError(f"a cache cannot be limited to {value} {name}", hint="give 1 or more")


@dataclass(frozen=True)
class Kept:
    """An entry as it lies on the disk: its key, when it was last used (ns since 1970), and its bytes."""

    key: str
    used_ns: int
    bytes: int


def scan(places: Places) -> list[Kept]:
    """All entries, the least recently used first."""
    found = []
    for key in places.entry_keys():
        folder = places.entries / key
        with contextlib.suppress(OSError):
            found.append(Kept(key, os.lstat(folder).st_mtime_ns, size_of(folder)))
    return sorted(found, key=lambda kept: (kept.used_ns, kept.key))


def last_used(places: Places, most: int) -> list[str]:
    """The keys of so many entries, the one used last first; only their folders are looked at."""
    stamps = []
    for key in places.entry_keys():
        with contextlib.suppress(OSError):
            stamps.append((os.lstat(places.entries / key).st_mtime_ns, key))
    return [key for _, key in sorted(stamps, reverse=True)[:most]]


def touch(folder: Path) -> None:
    """Note that an entry was used; a store that cannot be written does without."""
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(folder, ns=(now, now))


def make_room(places: Places, limits: Limits, new_bytes: int) -> Removed:
    """Remove what must leave before an entry of so many bytes comes; looks at all entries only when it could matter."""
    bound_broken(places, MOST_BROKEN)
    usage = Usage(places.usage)
    estimate = usage.estimate()
    is_near = estimate is None or estimate + new_bytes > limits.bytes
    if not is_near and len(places.entry_keys()) < limits.entries:
        return Removed()
    return collect(places, limits, new_bytes, 1)


def collect(places: Places, limits: Limits, new_bytes: int = 0, new_entries: int = 0) -> Removed:
    """Look at everything, and remove entries until what is to come fits too."""
    removed = Removed()
    kept = scan(places)
    aside = {path: size_of(path) for path in places.set_aside_ones()}
    total = sum(one.bytes for one in kept) + sum(aside.values())
    for path, size in aside.items():
        if total + new_bytes > limits.bytes and remove_entry(places, path, Removed()):
            total -= size
    count = len(kept)
    for one in kept:
        if total + new_bytes <= limits.bytes and count + new_entries <= limits.entries:
            break
        if remove_entry(places, places.entries / one.key, removed):
            total, count = total - one.bytes, count - 1
    gone = set(removed.keys)
    _repair_clock([one for one in kept if one.key not in gone], places)
    Usage(places.usage).reset(total)
    return removed


def bound_broken(places: Places, most: int) -> int:
    """Keep only the newest of what was set aside and return how many left."""
    aside = list(places.set_aside_ones())
    return sum(remove_entry(places, path, Removed()) for path in aside[: max(len(aside) - most, 0)])


def _repair_clock(kept: list[Kept], places: Places) -> None:
    # A clock that was set back leaves entries that would look newer than anything to come. They become the newest
    # of now, in their order.
    now = time.time_ns()
    ahead = [one for one in kept if one.used_ns > now + _FUTURE_NS]
    for place, one in enumerate(ahead):
        stamp = now - (len(ahead) - place)
        with contextlib.suppress(OSError):
            os.utime(places.entries / one.key, ns=(stamp, stamp))


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return amount_of(text, name) if text.strip() else default


def amount_of(text: str, name: str) -> int:
    """Read a number as ``2000``, ``500M`` or ``8 GiB``; OptionError says what ``name`` takes."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise OptionError(f"{name} does not take {text!r}", hint="it takes a whole number from 1 on, as 2000 or 500M")
    return int(match[1]) * _UNITS[match[2].upper()]
