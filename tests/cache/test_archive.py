"""An entry on its way between machines: believed for its signature, and for nothing else."""

import io
import json
import tarfile

import pytest
import zstandard
from store_cases import FILES, INGREDIENTS, KEY, OTHER, PROGRAM, put

from k31compile.cache import archive
from k31compile.cache.archive import pack, unpack
from k31compile.errors import StoreError

SECRET = b"s" * 32


@pytest.fixture
def packed(store):
    folder = put(store)
    return pack(KEY, (folder / "manifest.json").read_bytes(), {name: folder / name for name in FILES}, SECRET)


def sealed(body, key=KEY):
    return archive._HEAD + archive.sign(archive._signed(key, body), SECRET).encode() + b"\n" + body


def tar_of(*members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for about, data in members:
            member = tarfile.TarInfo(about) if isinstance(about, str) else about
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return zstandard.compress(packed.getvalue())


def test_there_and_back(packed):
    draft = unpack(KEY, packed, SECRET, 1 << 20)
    assert (draft.key, draft.kind, draft.ingredients, draft.program) == (KEY, "native", INGREDIENTS, PROGRAM)
    assert draft.files == FILES
    assert draft.report == {"fused": {"short_conv": 2}}


def test_the_same_bytes_each_time(packed, store):
    store.clear()
    folder = put(store)
    again = pack(KEY, (folder / "manifest.json").read_bytes(), {name: folder / name for name in FILES}, SECRET)
    assert again == packed


@pytest.mark.parametrize("length", [0, 5, 12, 40, 77, 78, 200, -1])
def test_a_part_of_it_is_refused(packed, length):
    with pytest.raises(StoreError, match=r"only the beginning of one|it was changed"):
        unpack(KEY, packed[:length], SECRET, 1 << 20)


def test_a_bit_anywhere_is_seen(packed):
    for place in [*range(90), *range(90, len(packed), 31)]:
        changed = packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :]
        with pytest.raises(StoreError):
            unpack(KEY, changed, SECRET, 1 << 20)


def test_another_secret_or_another_name_is_refused(packed):
    with pytest.raises(StoreError, match="its signature is not that of K31_CACHE_KEY"):
        unpack(KEY, packed, b"t" * 32, 1 << 20)
    with pytest.raises(StoreError, match="its signature is not that of K31_CACHE_KEY"):
        unpack(OTHER, packed, SECRET, 1 << 20)


def test_nothing_is_decompressed_before_the_signature_is_checked(packed, monkeypatch):
    monkeypatch.setattr(archive, "_decompressed", lambda *_: pytest.fail("decompressed"))
    with pytest.raises(StoreError):
        unpack(KEY, packed[:-1] + b"?", SECRET, 1 << 20)


def test_it_does_not_grow_beyond_the_cache():
    body = zstandard.compress(b"\0" * (50 << 20))
    assert len(body) < 10_000
    with pytest.raises(StoreError, match="it is larger than the whole cache may be, 1048576 bytes"):
        unpack(KEY, sealed(body), SECRET, 1 << 20)


def test_what_nobody_writes_is_refused_although_it_is_signed(store):
    manifest = (put(store) / "manifest.json").read_bytes()
    link = tarfile.TarInfo("library.so")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    other = json.dumps(json.loads(manifest) | {"key": OTHER}).encode()
    files = list(FILES.items())
    for body, says in (
        (b"no zstd", "it cannot be read"),
        (zstandard.compress(b"no tar"), "it cannot be read"),
        (tar_of(*files), "it cannot be read: 'manifest.json'"),
        (tar_of(("manifest.json", other), *files), "its manifest is that of another entry"),
        (
            tar_of(("manifest.json", manifest), files[0], ("library.so", b"other")),
            "its file 'library.so' is not as its",
        ),
        (tar_of(("manifest.json", manifest), files[0]), "its file 'library.so' is not as its manifest says"),
        (tar_of(("manifest.json", manifest), *files, ("x.so", b"")), "its file 'x.so' is not as its manifest says"),
        (tar_of(("manifest.json", manifest), *files, ("../x", b"")), "its file '../x' is not as its manifest says"),
        (tar_of(("manifest.json", manifest), files[0], (link, b"")), "'library.so' in it is no plain file"),
        (tar_of(("manifest.json", manifest), *files, files[0]), "'graph.txt' in it is no plain file"),
        (tar_of(("manifest.json", b"{}"), *files), "the manifest has format None"),
    ):
        with pytest.raises(StoreError, match=says):
            unpack(KEY, sealed(body), SECRET, 1 << 20)
