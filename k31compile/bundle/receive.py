"""Taking a bundle into the cache: everything is verified first, then each entry comes whole, under this user's key."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k31compile.bundle.container import Opened, open_bundle
from k31compile.bundle.parts import PARTS, part_of
from k31compile.cache.entry_store import EntryStore
from k31compile.cache.manifest import MANIFEST, is_key, is_payload_name, manifest_bytes, parse
from k31compile.cache.scratch import scratch_folder
from k31compile.cache.surroundings import describe_installation
from k31compile.errors import BundleError, StoreError
from k31compile.signatures import local_key, shared_key

_ENTRY = re.compile(r"entries/([0-9a-f]+)/([^/]+)")
_MOST_MANIFEST = 64 << 20
_SPARE_BYTES = 64 << 20


@dataclass
class Received:
    """What came of an import.

    Attributes:
        new: keys of entries that were not here.
        present: keys of entries that were here.
        failed: key or name -> why it could not be kept.
        parts: folder of a part -> {"new", "present"}.
        about: what the bundle says of the machine that made it.
        elsewhere: ingredient -> how many entries have another one than this machine and cannot be found here.

    """

    new: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    elsewhere: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "entries": {"new": self.new, "present": self.present},
            "failed": self.failed,
            "parts": self.parts,
            "about": self.about,
            "elsewhere": self.elsewhere,
        }


@dataclass
class _Unpacked:
    """Verified contents: entries by key with their manifests and files, and the parts by name."""

    manifests: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Path]]
    parts: dict[str, bytes]
    about: Mapping[str, Any]


def import_bundle(path: Path, store: EntryStore) -> Received:
    """Verify a bundle as a whole and keep what it brings; what is here already stays as it is.

    Raises:
        StoreError: K31_CACHE_KEY is missing or too short, or the cache is not this user's own.
        BundleError: the bundle is not to be trusted, damaged or too large; nothing was kept then.
    """
    key = shared_key()
    try:
        store.places.prepare()
        with scratch_folder(store.places.making, "import") as scratch:
            unpacked = _unpack(path, key, store, scratch)
            return _keep(unpacked, store)
    except OSError as error:
        raise BundleError(f"cannot be unpacked: {error.strerror}", str(error.filename or path), "make room") from error


def _unpack(path: Path, key: bytes, store: EntryStore, scratch: Path) -> _Unpacked:
    """Everything of a bundle, out of reach of every reader of the cache, once all of it was checked."""
    manifests: dict[str, bytes] = {}
    files: dict[str, dict[str, Path]] = {}
    parts: dict[str, bytes] = {}
    with open_bundle(path, key, store.limits.bytes) as opened:
        _check_names(opened, path)
        _check_room(opened, scratch, path)
        for count, (name, data) in enumerate(opened.members):
            entry = _ENTRY.fullmatch(name)
            if entry is None:
                parts[name] = data.read()
            elif entry[2] == MANIFEST:
                manifests[entry[1]] = data.read()
            else:
                staged = scratch / f"{count:06d}"
                with staged.open("xb") as file:
                    shutil.copyfileobj(data, file, 1 << 20)
                files.setdefault(entry[1], {})[entry[2]] = staged
        listed = opened.files
    found = {key: _checked_manifest(key, text, files.get(key, {}), listed, path) for key, text in manifests.items()}
    return _Unpacked(found, files, parts, opened.about)


def _check_names(opened: Opened, path: Path) -> None:
    """Refuse a bundle for the names and sizes that it announces, before anything of it is unpacked."""
    keys: set[str] = set()
    with_manifest: set[str] = set()
    for name, about in opened.files.items():
        entry, part = _ENTRY.fullmatch(name), part_of(name)
        if entry is not None and is_key(entry[1]) and (is_payload_name(entry[2]) or entry[2] == MANIFEST):
            keys.add(entry[1])
            if entry[2] == MANIFEST:
                with_manifest.add(entry[1])
            most = _MOST_MANIFEST if entry[2] == MANIFEST else about["bytes"]
        elif part is not None:
            most = part.most_bytes
        else:
            raise BundleError(f"holds {name!r}, which this version does not know", str(path), "export it with this one")
        if about["bytes"] > most:
            raise BundleError(f"holds {name!r} of {about['bytes']} bytes, and at most {most} are taken", str(path))
    if keys != with_manifest:
        raise BundleError(f"holds an entry without its manifest, {min(keys - with_manifest)[:12]}", where=str(path))


def _check_room(opened: Opened, scratch: Path, path: Path) -> None:
    total = sum(about["bytes"] for about in opened.files.values())
    free = shutil.disk_usage(scratch).free
    if 2 * total + _SPARE_BYTES > free:  # unpacked, and then copied into its entry
        where = str(scratch.parent)
        raise BundleError(f"{path} unpacks to {total} bytes, and {free} are free", where, "make room for twice as much")


def _checked_manifest(
    key: str, text: bytes, files: Mapping[str, Path], listed: Mapping[str, Mapping[str, Any]], path: Path
) -> dict[str, Any]:
    try:
        manifest = parse(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"entry {key[:12]}: {error}", str(path), "export it with this version") from None
    brought = {name: dict(listed[f"entries/{key}/{name}"]) for name in files}
    ingredients, program, report = (manifest[name] for name in ("ingredients", "program", "report"))
    if manifest["key"] != key or manifest["files"] != brought:
        raise BundleError(f"entry {key[:12]} does not have the files that its manifest lists", where=str(path))
    if manifest_bytes(key, manifest["kind"], ingredients, program, report, brought) != text:
        raise BundleError(f"the manifest of entry {key[:12]} is not written as this version does", where=str(path))
    return manifest


def _keep(unpacked: _Unpacked, store: EntryStore) -> Received:
    own = local_key()
    received = Received(about=dict(unpacked.about), parts={part.folder: {"new": 0, "present": 0} for part in PARTS})
    _keep_parts(unpacked.parts, received)
    here = describe_installation()
    for name, text in here.items():
        count = sum(manifest["ingredients"].get(name, text) != text for manifest in unpacked.manifests.values())
        if count:
            received.elsewhere[name] = count
    for key, manifest in unpacked.manifests.items():
        if store.find(key) is not None:
            received.present.append(key)
            continue
        kept = store.publish(
            key,
            manifest["kind"],
            manifest["ingredients"],
            manifest["program"],
            manifest["report"],
            dict(unpacked.files.get(key, {})),
            sign_with=own,
        )
        if kept is None:
            received.failed[key] = "the cache did not take it, see the warning"
        else:
            received.new.append(key)
    return received


def _keep_parts(bodies: Mapping[str, bytes], received: Received) -> None:
    here = {name: body for part in PARTS for name, body in part.exported()} if bodies else {}
    for name, body in bodies.items():
        part = part_of(name)
        assert part is not None
        if here.get(name) == body:
            received.parts[part.folder]["present"] += 1
            continue
        try:
            part.imported(name, body)
        except (StoreError, OSError) as error:
            received.failed[name] = str(error)
        else:
            received.parts[part.folder]["new"] += 1
