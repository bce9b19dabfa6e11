"""A store with small entries, a bundle of it, and bundles that somebody with the key has made on purpose."""

import hashlib
import hmac
import io
import json
import tarfile
from pathlib import Path

import zstandard

from k31compile.bundle.container import _DIGITS, _HEAD, _WORD, INDEX
from k31compile.cache.entry_store import EntryStore
from k31compile.cache.limits import Limits
from k31compile.signatures import shared_key

SECRET = "a secret of two machines"


def signed(path: Path, compressed: bytes, key: bytes | None = None) -> Path:
    """Write a bundle around some compressed bytes, rightly signed."""
    digest = hmac.new(key or shared_key(), _WORD + compressed, hashlib.sha256).hexdigest()
    path.write_bytes(_HEAD + digest.encode() + compressed)
    return path


def parts_of(path: Path) -> tuple[bytes, dict[str, bytes]]:
    """The signature of a bundle and its files, read with the usual tools."""
    data = path.read_bytes()
    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        return data[len(_HEAD) : len(_HEAD) + _DIGITS], {info.name: tar.extractfile(info).read() for info in tar}


def packed(files: dict[str, bytes], index: dict | None = None, kind: bytes = tarfile.REGTYPE, odd: str = "") -> bytes:
    """A tar with zstd of an index and files; the file `odd` is of another kind."""
    listed = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in sorted(files.items())
    }
    index = {"format": 1, "about": {}, "files": listed} | (index or {})
    out = io.BytesIO()
    for name, data in [(INDEX, json.dumps(index).encode()), *sorted(files.items())]:
        info = tarfile.TarInfo(name)
        info.size, info.type = len(data), kind if name == odd else tarfile.REGTYPE
        if name == odd:
            info.linkname = "/etc/passwd"
        out.write(info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
    out.write(bytes(1024))
    return zstandard.ZstdCompressor().compress(out.getvalue())


def other_machine(monkeypatch, tmp_path: Path, name: str = "other") -> EntryStore:
    """From now on this process is another user with an empty cache; its store."""
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / name))
    return EntryStore(tmp_path / name / "graphs", Limits())


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
