"""The keys that say who made a file, and the signatures made with them.

What a machine keeps for itself is signed with a key that never leaves the user's cache folder. What travels between
machines is signed with a secret that both were given, ``K31_CACHE_KEY``.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from k31compile.errors import StoreError
from k31compile.store import atomic_write, cache_dir

VARIABLE = "K31_CACHE_KEY"
_LEAST_CHARACTERS = 16
_KEY_BYTES = 32


def local_key() -> bytes:
    """This user's own key, made at random when there is none; 32 bytes, readable by this user alone.

    Raises StoreError where it cannot be made, is not whole, or was open to others.
    """
    path = _key_path()
    kept = _read_key(path)
    if kept is None:
        _make_key(path)
        kept = _read_key(path)
    if kept is None:
        raise StoreError("the signing key disappeared while it was made", where=str(path), hint="run it again")
    return kept


def has_shared_key() -> bool:
    """Tell whether this process was given a key that other machines have too."""
    return bool(os.environ.get(VARIABLE))


def shared_key() -> bytes:
    """The key made of ``K31_CACHE_KEY``, 32 bytes; StoreError when it is unset or too short to be a secret."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        raise StoreError(
            f"{VARIABLE} is not set, and what travels between machines is signed with it",
            hint=f"set {VARIABLE} to the same secret of at least {_LEAST_CHARACTERS} characters on both machines",
        )
    if len(text) < _LEAST_CHARACTERS:
        raise StoreError(
            f"{VARIABLE} has {len(text)} characters and needs at least {_LEAST_CHARACTERS}",
            hint="make one with: openssl rand -hex 32",
        )
    return hashlib.sha256(text.encode()).digest()


def signing_key() -> bytes:
    """The key for what is written now: the shared one where there is one, else this user's own."""
    return shared_key() if has_shared_key() else local_key()


def trusted_keys() -> list[bytes]:
    """The keys whose signatures are believed: the shared one where it is set, and this user's own where it exists."""
    keys = [shared_key()] if has_shared_key() else []
    try:
        own = _read_key(_key_path())
    except StoreError:
        if not keys:
            raise
        own = None
    return keys if own is None else [*keys, own]


def sign(data: bytes, key: bytes) -> str:
    """The HMAC-SHA256 of some bytes, as hexadecimal text."""
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def is_signed(data: bytes, signature: str, key: bytes) -> bool:
    """Tell whether a signature is that of these bytes with this key, in a time that tells nothing about either."""
    return hmac.compare_digest(sign(data, key).encode(), signature.encode("utf-8", "replace"))


def _key_path() -> Path:
    return cache_dir() / "signing.key"


def _read_key(path: Path) -> bytes | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"the signing key cannot be read: {error.strerror}", str(path), _remedy(path)) from error
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise StoreError("the signing key is not a file of this user", str(path), _remedy(path))
        if info.st_mode & 0o077:
            mode = f"{stat.S_IMODE(info.st_mode):04o}"
            raise StoreError(f"others can open the signing key (mode {mode})", str(path), _remedy(path))
        data = os.read(handle, _KEY_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) != _KEY_BYTES:
        raise StoreError(f"the signing key does not have {_KEY_BYTES} bytes", str(path), _remedy(path))
    return data


def _remedy(path: Path) -> str:
    return f"run: rm -r {path}; a new one is made, and what was kept under the old one is built again"


def _make_key(path: Path) -> None:
    # link() instead of rename(): of two processes that start at once, both must end with the first one's key.
    try:
        with tempfile.TemporaryDirectory(prefix=".key-", dir=path.parent) as own:
            fresh = Path(own) / "key"
            atomic_write(fresh, secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
    except OSError as error:
        raise StoreError(f"the signing key cannot be made: {error.strerror}", where=str(path)) from error
