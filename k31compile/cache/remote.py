"""A second tier behind the local store: any place that fsspec can reach, asked on a miss and given what is new.

What comes from there is believed for its signature alone, and is checked before anything is written here. A place that
does not answer costs a bounded wait and one warning, and is then left alone for the rest of the process.
"""

from __future__ import annotations

import hashlib
import os
import queue
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.utils import get_protocol

from k31compile.cache.archive import pack, unpack
from k31compile.cache.entry_store import EntryStore, FoundEntry
from k31compile.cache.limits import Limits
from k31compile.cache.manifest import MANIFEST
from k31compile.cache.shared_kernels import keep_kernels
from k31compile.errors import OptionError, StoreError
from k31compile.signatures import shared_key

TIMEOUT_SECONDS = 5.0
"""``K31_REMOTE_TIMEOUT`` says otherwise."""

# A write to these appears at once and whole; elsewhere it is written beside and renamed.
_WHOLE_WRITES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "r2", "memory"}
_QUICK = 0.1  # of the timeout: an answer within it is no wait


class Remote:
    """A place of entries at a URL.

    Attributes:
        url: where.
        off: why it is not asked any more in this process, or "".
        refusal: why nothing more is given to it, or "".
        is_written: whether what is made here is given to it at once; ``K31_REMOTE_WRITE=0`` says no.

    """

    def __init__(self, url: str) -> None:
        protocol = get_protocol(url)
        if protocol not in fsspec.available_protocols():
            raise StoreError(f"no kind of store is called {protocol!r}", where=url, hint="give a path or an fsspec URL")
        self.url = url.rstrip("/")
        self._protocol = protocol
        self._secret = shared_key()
        # Part of every name, so that users of one place with different secrets are not in each other's way.
        self._circle = hashlib.sha256(b"k31-circle\0" + self._secret).hexdigest()[:12]
        self._timeout = self._left = timeout_seconds()
        self.off = self.refusal = ""
        self.is_written = os.environ.get("K31_REMOTE_WRITE", "1") != "0"

    def name_of(self, key: str) -> str:
        """The URL of an entry."""
        return f"{self.url}/{self._circle}/{key}.entry"

    def fetch(self, key: str) -> bytes | None:
        """The bytes of an entry, unchecked, or None where there is none or nobody answers."""
        if self.off:
            return None
        name = self.name_of(key)
        begin = time.monotonic()
        result, error = self._in_time(lambda: self._read(name), f"asked for entry {key[:12]}")
        if error is not None:
            self._turn_off(f"it failed when it was asked for entry {key[:12]}: {_in_one_line(error)}")
        elif result is None:  # a slow no is time lost, a slow yes is not
            self._spend(time.monotonic() - begin)
        return result

    def give(self, key: str, data: bytes, is_asked_for: bool = False) -> bool:
        """Put the bytes of an entry there, for others, and tell whether that was done in time.

        Unless somebody asked for it the time is counted as lost. A place that cannot be written is still read.
        """
        if self.off or self.refusal:
            return False
        name = self.name_of(key)
        begin = time.monotonic()
        result, error = self._in_time(lambda: self._write(name, data), f"given entry {key[:12]}")
        if error is not None:
            self.refusal = f"it failed when it was given entry {key[:12]}: {_in_one_line(error)}"
            _warn(f"the remote cache {self.url} is given nothing more by this process, {self.refusal}")
        elif not is_asked_for:
            self._spend(time.monotonic() - begin)
        return result is not None

    def secret(self) -> bytes:
        """The key that entries there are signed with."""
        return self._secret

    def _read(self, name: str) -> bytes | None:
        system, path = fsspec.core.url_to_fs(name)
        try:
            data: bytes = system.cat_file(path)
        except FileNotFoundError:
            return None
        return data

    def _write(self, name: str, data: bytes) -> bytes:
        system, path = fsspec.core.url_to_fs(name)
        if self._protocol in _WHOLE_WRITES:
            system.pipe_file(path, data)
            return data
        aside = f"{path}.{secrets.token_hex(6)}.part"
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            system.pipe_file(aside, data)
            system.mv(aside, path)
        except BaseException:
            if system.exists(aside):
                system.rm_file(aside)
            raise
        return data

    def _in_time(self, work: Callable[[], bytes | None], what: str) -> tuple[bytes | None, Exception | None]:
        """Do some work in a thread, and wait for it as long as there is patience left; then it is off for good."""
        done: queue.SimpleQueue[tuple[bytes | None, Exception | None]] = queue.SimpleQueue()
        # A daemon: a connection that never ends must not keep the process from ending.
        threading.Thread(target=lambda: done.put(_tried(work)), daemon=True, name="k31-remote").start()
        try:
            return done.get(timeout=max(self._left, 0.001))
        except queue.Empty:
            self._turn_off(f"it did not answer within {self._left:.2g} s when it was {what}")
            return None, None

    def _spend(self, waited: float) -> None:
        if waited > self._timeout * _QUICK and not self.off:
            self._left -= waited
            if self._left <= 0:
                self._turn_off(f"waiting for it took {self._timeout:g} s together")

    def _turn_off(self, why: str) -> None:
        if not self.off:
            self.off = why
            _warn(f"the remote cache {self.url} is not used any more by this process, {why}; the local one goes on")


class TieredStore(EntryStore):
    """A local store with a remote one behind it: what is missing here is fetched, what is made here is given."""

    def __init__(self, root: Path, remote: Remote, limits: Limits | None = None) -> None:
        super().__init__(root, limits)
        self.remote = remote
        self._has_kernels = False

    def find(self, key: str) -> FoundEntry | None:
        """The entry of a key, from here or, checked and written down here, from there."""
        found = super().find(key)
        if found is not None:
            return found
        data = self.remote.fetch(key)
        if data is None:
            return None
        try:
            draft = unpack(key, data, self.remote.secret(), self.limits.bytes)
            super().publish(key, draft.kind, draft.ingredients, draft.program, draft.report, draft.files)
        except StoreError as error:
            _warn(f"entry {key[:12]} of the remote cache is not used: {error.what} ({self.remote.name_of(key)})")
            return None
        return super().find(key)

    def publish(
        self,
        key: str,
        kind: str,
        ingredients: Mapping[str, str],
        program: Mapping[str, Any],
        report: Mapping[str, Any],
        files: Mapping[str, bytes | Path],
        sign_with: bytes | None = None,
    ) -> Path | None:
        """Write an entry here and give it to the remote store where that is wanted."""
        folder = super().publish(key, kind, ingredients, program, report, files, sign_with)
        if folder is not None and self.remote.is_written:
            self.push(key)
            self._keep_kernels_once()
        return folder

    def _keep_kernels_once(self) -> None:
        if not self._has_kernels:
            self._has_kernels = True
            keep_kernels(self)

    def push(self, key: str, is_asked_for: bool = False) -> bool:
        """Give a sound entry of here to the remote store, whether it has it or not; tell whether that was done."""
        entry = super().find(key)
        if entry is None:
            return False
        named = {name: entry.path(name) for name in entry.manifest["files"]}
        try:
            packed = pack(key, (entry.folder / MANIFEST).read_bytes(), named, self.remote.secret())
        except OSError:  # it left meanwhile
            return False
        return self.remote.give(key, packed, is_asked_for)


def timeout_seconds() -> float:
    """How long a remote store may keep a process waiting in vain, all together."""
    text = os.environ.get("K31_REMOTE_TIMEOUT", "").strip()
    try:
        seconds = float(text) if text else TIMEOUT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86400:
        raise OptionError(f"K31_REMOTE_TIMEOUT does not take {text!r}", hint="it takes seconds, as 5 or 0.5")
    return seconds


def _tried(work: Callable[[], bytes | None]) -> tuple[bytes | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _warn(text: str) -> None:
    warnings.warn(f"k31compile: {text}", stacklevel=4)
