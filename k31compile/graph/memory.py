"""What was confirmed and what was contradicted, by region and reading: in this process, and in the user's store.

A verdict is remembered for exactly what it was found for (`Describer`), with exactly what it rests on
(`surroundings`). One signed file a region holds no code, only numbers; what cannot be believed is named and found out
anew.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k31compile.errors import StoreError
from k31compile.graph.describe import Described
from k31compile.graph.surroundings import situation, surroundings
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

FOLDER = "regions"
MOST_FILES, MOST_FILE_BYTES, MOST_READINGS = 2048, 64 << 20, 256
_MOST_IN_PROCESS = 8192
_FORMAT = 1
_SOURCES = ("graph", "kernels", "passes/fusion", "passes/recognise")
_NAME = re.compile(f"{FOLDER}/{FILE_NAMES[FOLDER]}")


@dataclass(frozen=True)
class Verdict:
    """What came of one reading: its evidence and what it learned, or the reason and the sample that refused it.

    `evidence` and `learned` are plain JSON. `lasts` is False for what may be otherwise the next time.
    """

    evidence: Mapping[str, Any] | None = None
    learned: Any = None
    reason: str = ""
    trials: int = 0
    lasts: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        if self.evidence is None:
            return {"refused": self.reason, "trials": self.trials}
        return {"confirmed": dict(self.evidence), "learned": self.learned}

    @staticmethod
    def from_dict(data: Any) -> "Verdict":
        """The inverse of `to_dict`; ValueError for anything else."""
        match data:
            case {"refused": str(reason), "trials": int(trials), **rest} if not rest:
                return Verdict(reason=reason, trials=trials)
            case {"confirmed": dict(evidence), "learned": learned, **rest} if not rest:
                return Verdict(_checked(evidence), learned)
        raise ValueError("it is no verdict")


def _checked(evidence: dict[str, Any]) -> dict[str, Any]:
    match evidence:
        case {
            "name": str(),
            "samples": int(samples),
            "sizes": dict(sizes),
            "tolerance": float(),
            "worst_error": float(),
            **rest,
        } if not rest and samples > 0 and all(type(size) is int for size in sizes.values()):
            return evidence
    raise ValueError("its evidence is not whole")


@dataclass(frozen=True)
class Place:
    """Where a verdict stands: the region with all that surrounds it, and the reading in it."""

    region: str
    reading: str
    is_portable: bool
    held: tuple[object, ...] = ()


def place_of(region: Described, reading: Described) -> Place:
    """The place of a reading's verdict."""
    around = f"{_FORMAT}\n{surroundings(_SOURCES)}\n{situation()}\n"
    key = Described(around + region.text, region.is_portable, ()).digest
    return Place(key, reading.digest, region.is_portable and reading.is_portable, (*region.held, *reading.held))


@dataclass
class Memory:
    """Verdicts in this process, the oldest regions forgotten first; `held` keeps alive what texts name by its place."""

    regions: dict[str, dict[str, Verdict]] = field(default_factory=dict)
    held: dict[str, list[object]] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)

    def find(self, place: Place) -> Verdict | None:
        """The verdict at a place."""
        return self.regions.get(place.region, {}).get(place.reading)

    def keep(self, place: Place, verdict: Verdict) -> None:
        """Remember a verdict."""
        while len(self.regions) >= _MOST_IN_PROCESS and place.region not in self.regions:
            oldest = next(iter(self.regions))
            self.held.pop(oldest, None)
            del self.regions[oldest]
        self.regions.setdefault(place.region, {})[place.reading] = verdict
        if place.held:
            self.held.setdefault(place.region, []).extend(place.held)

    def forget(self) -> None:
        """Forget everything; files stay."""
        self.regions.clear()
        self.held.clear()
        self.stored.clear()


MEMORY = Memory()


@dataclass
class Session:
    """One compile: what it confirmed itself, and whether it reads and writes files."""

    memory: Memory = field(default_factory=lambda: MEMORY)
    is_stored: bool = False
    fresh: set[tuple[str, str]] | None = None
    changed: set[str] = field(default_factory=set)

    def find(self, place: Place) -> Verdict | None:
        """What is known of a place, from its file where this process has not seen that yet."""
        if self.is_stored and place.is_portable and place.region not in self.memory.stored:
            self.memory.stored.add(place.region)
            for reading, verdict in _read(place.region).items():
                known = Place(place.region, reading, is_portable=True)
                if self.memory.find(known) is None:
                    self.memory.keep(known, verdict)
        return self.memory.find(place)

    def keep(self, place: Place, verdict: Verdict) -> None:
        """Remember a verdict that was found now."""
        if not verdict.lasts:
            return
        self.memory.keep(place, verdict)
        if self.fresh is not None:
            self.fresh.add((place.region, place.reading))
        if self.is_stored and place.is_portable:
            self.changed.add(place.region)

    def is_from_before(self, place: Place) -> bool:
        """Whether a verdict was known before this compile began."""
        return self.fresh is not None and (place.region, place.reading) not in self.fresh

    def write(self) -> None:
        """Write down the regions of which something new is known."""
        try:
            folder = _folder() if self.changed else None
            for region in sorted(self.changed):
                assert folder is not None
                write_signed(folder / _file_name(region), _body(region, self.memory.regions.get(region, {})))
            if folder is not None:
                keep_newest(folder, "*.signed", MOST_FILES, MOST_FILE_BYTES)
        except (StoreError, OSError) as error:
            log.warning("what was confirmed could not be kept for the next process: %s", error)
        self.changed.clear()


_ALONE = Session()
_SESSION: ContextVar[Session] = ContextVar("confirm_session")


def session() -> Session:
    """The compile that asks; outside of any, one that is never over and has no files."""
    return _SESSION.get(_ALONE)


@contextmanager
def remembering(stored: bool) -> Iterator[None]:
    """One compile inside the block, with this process's memory and its files, or with neither."""
    one = Session(MEMORY if stored else Memory(), stored, set())
    token = _SESSION.set(one)
    try:
        yield
    finally:
        _SESSION.reset(token)
        one.write()


def exported() -> Iterator[tuple[str, bytes]]:
    """What is known of regions, for a bundle: file names below the cache folder, and contents without signatures."""
    yield from sound_bodies(_folder(), FOLDER)


def imported(name: str, body: bytes) -> None:
    """Take what another machine exported; whoever calls has verified that it may be believed.

    Verdicts that are here already stay.

    Raises:
        StoreError: it is not what `exported` gives.
    """
    found = _NAME.fullmatch(name)
    try:
        region, verdicts = _parsed(body)
    except ValueError as error:
        raise StoreError(f"holds no confirmed region: {error}", where=name, hint="export it again") from None
    if found is None or not region.startswith(found[1]):
        raise StoreError("is not named after the region that it holds", where=name, hint="export it again")
    write_signed(_folder() / _file_name(region), _body(region, {**verdicts, **_read(region)}))
    MEMORY.stored.discard(region)


def _folder() -> Path:
    return private_folder(FOLDER)


def _file_name(region: str) -> str:
    return f"{region[:40]}.signed"


def _body(region: str, verdicts: Mapping[str, Verdict]) -> bytes:
    kept = list(verdicts.items())
    # The confirmed ones first: without a refusal a reading is run again, without them all are.
    kept = sorted(kept, key=lambda item: item[1].evidence is None)[:MOST_READINGS]
    body = {"format": _FORMAT, "region": region, "readings": {key: one.to_dict() for key, one in kept}}
    return json.dumps(body, sort_keys=True, indent=1).encode()


def _parsed(body: bytes) -> tuple[str, dict[str, Verdict]]:
    data: Any = json.loads(body)
    require_keys(data, {"format": int, "region": str, "readings": dict})
    if data["format"] != _FORMAT or not re.fullmatch("[0-9a-f]{64}", data["region"]):
        raise ValueError("it is of another format")
    if not all(re.fullmatch("[0-9a-f]{64}", key) for key in data["readings"]):
        raise ValueError("a reading in it has no digest for a name")
    return data["region"], {key: Verdict.from_dict(one) for key, one in data["readings"].items()}


def _read(region: str) -> dict[str, Verdict]:
    """What the file of a region holds; one that cannot be believed is named, and its region confirmed anew."""
    path: Path | None = None
    try:
        path = _folder() / _file_name(region)
        body = read_signed(path)
        if body is None:
            return {}
        found, verdicts = _parsed(body)
        if found != region:
            raise ValueError("it is the file of another region")
    except (StoreError, OSError, ValueError) as error:
        log.warning("%s is not used, its region is confirmed anew: %s", path or FOLDER, error)
        return {}
    touch(path)
    return verdicts
