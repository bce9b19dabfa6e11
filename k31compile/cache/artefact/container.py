"""The file F.k31: a zip with a manifest, its signature, and the files whose hashes the manifest holds.

Nothing of it is used before the file's owner and mode, then the signature, then each file's hash were found right. The
manifest has no path and no time in it; where weights lie stands beside it, as a hint that hashes make harmless.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31compile import signatures
from k31compile.errors import ArtefactError, StoreError
from k31compile.store import atomic_file, check_private

FORMAT = 2
MANIFEST, SIGNATURE, PLACES = "manifest.json", "signature.json", "places.json"
_MOST_SMALL = 64 << 20
_DATE = (1980, 1, 1, 0, 0, 0)
_OTHER_PLACE = "make room or give -o another folder"
_NOT_SIGNED = "set K31_CACHE_KEY to the key that it was made with, or make it again here: k31 compile TARGET -o F.k31"


@dataclass(frozen=True)
class Opened:
    """A file whose signature and hashes were right: its manifest, its files by name, and where weights may lie."""

    path: Path
    manifest: dict[str, Any]
    digest: str
    files: Mapping[str, bytes]
    places: dict[str, list[str]]


def write_artefact(
    path: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes], places: Mapping[str, list[str]]
) -> None:
    """Write F.k31 under its name at once; the hashes of the files are added to the manifest.

    Raises:
        StoreError: there is no key to sign with, or the file cannot be written.
    """
    listed = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    text = canonical({**manifest, "format": FORMAT, "files": listed})
    members = {
        MANIFEST: text,
        SIGNATURE: canonical(_signatures_of(text)),
        PLACES: canonical(places),
        **dict(sorted(files.items())),
    }
    try:
        with atomic_file(path, mode=0o644) as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                info = zipfile.ZipInfo(name, _DATE)
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o600 << 16
                archive.writestr(info, data)
    except OSError as error:
        raise StoreError(f"it cannot be written: {error.strerror or error}", str(path), hint=_OTHER_PLACE) from error


def canonical(data: Any) -> bytes:
    """JSON with one spelling for equal data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _signatures_of(text: bytes) -> dict[str, str]:
    made = {"local": signatures.sign(text, signatures.local_key())}
    if signatures.has_shared_key():
        made["shared"] = signatures.sign(text, signatures.shared_key())
    return made


def open_artefact(path: Path) -> Opened:
    """Read a file and check all that can be checked without using it.

    Raises:
        ArtefactError: it is missing, damaged, not signed by a key of this user, or of another format.
        StoreError: it belongs to somebody else, or others can write it.
    """
    where = str(path)
    data = _read_own(path)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            if len(set(names)) != len(names):
                raise ArtefactError("it holds two files of one name", where)
            text = _small(archive, MANIFEST)
            _check_signature(text, _small(archive, SIGNATURE), where)
            manifest = _manifest(text, where)
            files = _files(archive, manifest["files"], set(names), where)
            places = _places(_small(archive, PLACES))
    except (zipfile.BadZipFile, KeyError, OSError, EOFError, ValueError, RuntimeError) as error:
        raise ArtefactError(f"it is cut off, damaged or no artefact: {error}", where) from error
    except Exception as error:
        if type(error).__module__ == "zlib":
            raise ArtefactError(f"it is damaged: {error}", where) from error
        raise
    return Opened(path, manifest, hashlib.sha256(text).hexdigest(), files, places)


def _small(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member that nothing vouches for yet: what would unpack to more than anybody writes is not unpacked."""
    size = archive.getinfo(name).file_size
    if size > _MOST_SMALL:
        raise ValueError(f"{name} in it has {size} bytes")
    return archive.read(name)


def _read_own(path: Path) -> bytes:
    where = str(path)
    if path.is_symlink():
        raise ArtefactError("it is a symbolic link", where, hint="give the path of the file that it points to")
    if not path.exists():
        raise ArtefactError("there is no such file", where)
    if not path.is_file():
        raise ArtefactError("it is no file", where)
    try:
        check_private(path)
    except StoreError as error:
        hint = error.hint if "chmod" in error.hint else "copy it as this user, or change its owner"
        raise StoreError(error.what, where, hint=hint) from error
    with open(path, "rb") as file:
        # What was looked at above could be another file by now.
        info = os.fstat(file.fileno())
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise StoreError("it was replaced while it was read", where)
        return file.read()


def _check_signature(text: bytes, stored: bytes, where: str) -> None:
    known = json.loads(stored)
    if not isinstance(known, dict):
        raise ArtefactError("it has no signature", where)
    shared, local = known.get("shared"), known.get("local")
    trusted = signatures.trusted_keys()
    for signature in (shared, local):
        if isinstance(signature, str) and any(signatures.is_signed(text, signature, key) for key in trusted):
            return
    raise ArtefactError("it is not signed by a key of this user", where, hint=_NOT_SIGNED)


def _manifest(text: bytes, where: str) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise ArtefactError(f"it has format {manifest.get('format')!r}, this k31compile reads {FORMAT}", where)
    return manifest


def _files(
    archive: zipfile.ZipFile, listed: Mapping[str, Mapping[str, Any]], names: set[str], where: str
) -> dict[str, bytes]:
    if odd := sorted(names ^ {MANIFEST, SIGNATURE, PLACES, *listed}):
        raise ArtefactError(f"its list of files and its files differ, first in {odd[0]!r}", where)
    files = {}
    for name, entry in listed.items():
        if archive.getinfo(name).file_size != entry["bytes"]:
            raise ArtefactError(f"{name} in it has not the size that was written", where)
        files[name] = archive.read(name)
        if hashlib.sha256(files[name]).hexdigest() != entry["sha256"]:
            raise ArtefactError(f"{name} in it is not what was written", where)
    return files


def _places(text: bytes) -> dict[str, list[str]]:
    found = json.loads(text)
    return {
        str(name): [str(place) for place in places if isinstance(place, str)]
        for name, places in (found.items() if isinstance(found, dict) else ())
        if isinstance(places, list)
    }
