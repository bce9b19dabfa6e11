"""What travels beside compiled graphs: parts that know themselves what they export and how it is taken in again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from k31compile.graph import memory
from k31compile.kernels.cpu import build
from k31compile.leaves import known
from k31compile.signed_file import MOST_BYTES


@dataclass(frozen=True)
class Part:
    """A part by the first folder of its names.

    Attributes:
        folder: the part of a name before its slash.
        exported: names below the cache folder and contents without signatures.
        imported: keeps one of them under this user's own signature; StoreError for what `exported` does not give.
        most_bytes: no more than that is one of them.

    """

    folder: str
    exported: Callable[[], Iterator[tuple[str, bytes]]]
    imported: Callable[[str, bytes], None]
    most_bytes: int


PARTS = (
    Part("functions", known.exported, known.imported, MOST_BYTES),
    Part("kernels", build.exported, build.imported, 256 << 20),
    Part("regions", memory.exported, memory.imported, MOST_BYTES),
)


def part_of(name: str) -> Part | None:
    """The part that a name belongs to."""
    folder = name.partition("/")[0]
    return next((part for part in PARTS if part.folder == folder), None)
