"""What an interrupted conversion had finished: a small file beside the shards, gone when all is done."""

import contextlib
import fcntl
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from k31compile.errors import WeightFileError
from k31compile.store import atomic_write, partial_prefix, sha256_of

JOURNAL = ".k31-convert.json"


@dataclass(frozen=True)
class Finished:
    """A shard that is written: its hash, that of its source, and the hashes of its tensors where an index has any."""

    sha256: str
    source_sha256: str
    tensors: dict[str, str] = field(default_factory=dict)


@dataclass
class Journal:
    """The finished shards of a conversion of one plan into one folder."""

    folder: Path
    plan: str
    finished: dict[str, Finished] = field(default_factory=dict)

    @classmethod
    def opened(cls, folder: Path, plan: str) -> "Journal":
        """The journal of an interrupted conversion of the same plan, else a new one.

        Raises:
            WeightFileError: the folder holds something else than what such a conversion left.
        """
        found = cls(folder, plan)
        path = folder / JOURNAL
        if not path.exists():
            others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(partial_prefix(JOURNAL))]
            if others:
                raise WeightFileError(
                    f"the folder holds {sorted(others)[0]} already, and nothing is written over",
                    where=str(folder),
                    hint="give a folder that is empty or new, or the one of an interrupted conversion",
                )
            return found
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            entries = {name: Finished(**entry) for name, entry in data["finished"].items()}
            known = data["plan"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightFileError(f"the journal cannot be read: {error!r}", where=str(path), hint=_REMOVE) from error
        if known != plan:
            raise WeightFileError(
                "an interrupted conversion of other tensors or to another layout is there",
                where=str(path),
                hint=_REMOVE,
            )
        found.finished = entries
        return found

    def is_done(self, name: str, source_sha256: str) -> bool:
        """Whether a shard of this source was finished, and still has the bytes that were written."""
        entry = self.finished.get(name)
        path = self.folder / name
        return (
            entry is not None
            and entry.source_sha256 == source_sha256
            and path.is_file()
            and sha256_of(path) == entry.sha256
        )

    def add(self, name: str, entry: Finished) -> None:
        """Write down that a shard is finished."""
        self.finished[name] = entry
        self.save()

    def save(self) -> None:
        """Write the journal."""
        entries = {name: asdict(entry) for name, entry in self.finished.items()}
        text = json.dumps({"plan": self.plan, "finished": entries}, indent=1, sort_keys=True)
        atomic_write(self.folder / JOURNAL, text.encode(), mode=0o644)

    def remove(self) -> None:
        """All is done."""
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def remove_partial(self, names: Collection[str]) -> None:
        """Remove what a process that was killed had begun to write of files of these names, and nothing else."""
        begun = tuple(partial_prefix(name) for name in (JOURNAL, *names))
        for path in self.folder.glob(".*"):
            if path.name.startswith(begun) and path.name not in names and path.is_file():
                path.unlink(missing_ok=True)


_REMOVE = "repeat the call that was interrupted, or remove the folder"


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder against a second conversion into it; the system lets go of it however this process ends.

    Raises:
        WeightFileError: another process converts into it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WeightFileError(
                "another process converts into this folder", where=str(folder), hint="wait for it, or give another one"
            ) from error
        yield
    finally:
        os.close(descriptor)
