"""A bundle: one signed file, verified before anything is kept, kept whole, the same bytes for the same content."""

import hashlib
import io
import json
import os
import stat
import tarfile
import warnings

import pytest
import zstandard
from bundle_cases import SECRET, files_below, other_machine, packed, parts_of, signed
from store_cases import FILES, INGREDIENTS, KEY, OTHER, PROGRAM, left_over, put

from k31compile.bundle import parts
from k31compile.bundle.container import INDEX, open_bundle
from k31compile.bundle.parts import Part
from k31compile.bundle.receive import import_bundle
from k31compile.bundle.send import export_bundle
from k31compile.cache.entry_store import EntryStore
from k31compile.cache.limits import Limits
from k31compile.cache.verify import read_manifest
from k31compile.errors import BundleError, StoreError
from k31compile.kernels.cpu import build
from k31compile.signatures import local_key, shared_key


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("K31_CACHE_KEY", SECRET)


@pytest.fixture
def bundle(store, tmp_path):
    """A bundle of two entries, one of them signed with this machine's own key."""
    put(store)
    key = os.environ.pop("K31_CACHE_KEY")
    put(store, OTHER, {**INGREDIENTS, "inputs": "t0 [9]"})
    os.environ["K31_CACHE_KEY"] = key
    path = tmp_path / "graphs.k31bundle"
    export_bundle(path, store)
    return path


def test_what_is_exported_is_found_on_another_machine(bundle, tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    received = import_bundle(bundle, there)
    assert sorted(received.new) == [KEY, OTHER]
    assert not received.present
    assert not received.failed
    monkeypatch.delenv("K31_CACHE_KEY")  # it is this user's own from now on
    found = there.find(KEY)
    assert found is not None
    assert {name: found.path(name).read_bytes() for name in FILES} == FILES
    assert found.manifest["program"] == PROGRAM
    assert read_manifest(there.places.entries / KEY, [local_key()])["ingredients"] == INGREDIENTS
    for path in (there.places.entries / KEY).iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not left_over(there)


def test_what_is_here_stays_as_it_is(bundle, tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    import_bundle(bundle, there)
    before = files_below(there.places.entries)
    received = import_bundle(bundle, there)
    assert sorted(received.present) == [KEY, OTHER]
    assert not received.new
    assert files_below(there.places.entries) == before


def test_a_broken_entry_is_healed(bundle, tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    import_bundle(bundle, there)
    (there.places.entries / KEY / "library.so").write_bytes(b"cut")
    with pytest.warns(UserWarning, match="is set aside"):
        received = import_bundle(bundle, there)
    assert (received.new, received.present) == ([KEY], [OTHER])
    assert there.find(KEY) is not None


def test_equal_content_is_equal_bytes(bundle, store, tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    import_bundle(bundle, there)
    os.utime(there.places.entries / KEY, ns=(1, 1))
    export_bundle(tmp_path / "again", there)
    assert (tmp_path / "again").read_bytes() == bundle.read_bytes()
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600


def test_the_usual_tools_read_it(bundle):
    _, files = parts_of(bundle)
    names = [INDEX, *(f"entries/{key}/{name}" for key in (KEY, OTHER) for name in ("graph.txt", "library.so"))]
    assert set(names) <= set(files)
    assert list(files) == [INDEX, *sorted(set(files) - {INDEX})]
    listed = json.loads(files[INDEX])["files"]
    assert {name: hashlib.sha256(files[name]).hexdigest() for name in listed} == {
        name: about["sha256"] for name, about in listed.items()
    }
    assert not any(name.endswith("signature") for name in files)


def test_entries_are_chosen_by_their_first_digits(bundle, store, tmp_path):
    sent = export_bundle(tmp_path / "one", store, [KEY[:8]])
    assert sent.entries == (KEY,)
    with pytest.raises(BundleError, match="K31-0506: no entry of the cache has the key '0123'"):
        export_bundle(tmp_path / "none", store, ["0123"])
    assert not (tmp_path / "none").exists()


def test_nothing_to_export_is_said(tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    with pytest.raises(BundleError, match=r"the cache has no entry .*k31 cache warm"):
        export_bundle(tmp_path / "none", there)


@pytest.mark.parametrize(("secret", "message"), [("", "K31_CACHE_KEY is not set"), ("short", "needs at least 16")])
def test_without_the_secret_both_refuse_and_say_what_helps(bundle, store, tmp_path, monkeypatch, secret, message):
    there = other_machine(monkeypatch, tmp_path)
    monkeypatch.setenv("K31_CACHE_KEY", secret)
    with pytest.raises(StoreError, match=message):
        import_bundle(bundle, there)
    with pytest.raises(StoreError, match=message):
        export_bundle(tmp_path / "none", store)
    assert not there.root.exists()
    assert not (tmp_path / "none").exists()


def assert_refused(path, there, message):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BundleError, match=message):
            import_bundle(path, there)
    assert not there.places.entry_keys()
    assert not left_over(there)


def test_another_secret_is_refused(bundle, tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    monkeypatch.setenv("K31_CACHE_KEY", SECRET + "?")
    assert_refused(bundle, there, "not signed with the K31_CACHE_KEY of this process, or was changed since")


@pytest.mark.parametrize("place", [0, 5, 30, 90, 200, -1])
def test_a_flipped_byte_is_refused(bundle, tmp_path, monkeypatch, place):
    there = other_machine(monkeypatch, tmp_path)
    data = bytearray(bundle.read_bytes())
    data[place] ^= 1
    bundle.write_bytes(data)
    assert_refused(bundle, there, r"is no bundle of k31|not signed with the K31_CACHE_KEY")


@pytest.mark.parametrize("change", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data + b"x"])
def test_a_cut_or_longer_file_is_refused(bundle, tmp_path, monkeypatch, change):
    there = other_machine(monkeypatch, tmp_path)
    bundle.write_bytes(change(bundle.read_bytes()))
    assert_refused(bundle, there, r"is no bundle of k31|not signed with")


def test_what_is_no_file_is_refused(tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tmp_path / "pipe", there, "is no file")
    assert_refused(tmp_path, there, "is no file|cannot be read")
    assert_refused(tmp_path / "missing", there, "cannot be read: No such file")


HOSTILE_NAMES = [
    "../../evil",
    "entries/../../evil/x",
    "/etc/evil",
    "entries/" + KEY + "/../x",
    "entries/" + KEY + "/.hidden",
    "entries/short/graph.txt",
    "entries/" + KEY + "/signature",
    "kernels/../x",
    "unknown/thing",
    "signing.key",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_that_leads_elsewhere_is_refused_even_when_signed(tmp_path, monkeypatch, name):
    there = other_machine(monkeypatch, tmp_path)
    path = signed(tmp_path / "hostile", packed({name: b"x"}))
    assert_refused(path, there, "lists files in a way that nobody writes|does not know|without its manifest")
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.XHDTYPE]
)
def test_links_and_devices_are_refused_even_when_signed(bundle, tmp_path, monkeypatch, kind):
    there = other_machine(monkeypatch, tmp_path)
    _, files = parts_of(bundle)
    del files[INDEX]
    path = signed(tmp_path / "hostile", packed(files, kind=kind, odd=f"entries/{KEY}/graph.txt"))
    assert_refused(path, there, "which is no plain file")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    small = EntryStore(there.root, Limits(bytes=1 << 20))
    files = {f"entries/{KEY}/graph.txt": bytes(64 << 20), f"entries/{KEY}/manifest.json": b"{}"}
    path = signed(tmp_path / "bomb", packed(files))
    assert path.stat().st_size < 1 << 16
    assert_refused(path, small, "would unpack to 67108866 bytes, and this cache may have 1048576")


def test_a_bomb_that_lies_about_its_size_is_refused(tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    big = {f"entries/{KEY}/graph.txt": bytes(64 << 20), f"entries/{KEY}/manifest.json": b"{}"}
    listed = {name: {"bytes": 2, "sha256": "0" * 64} for name in sorted(big)}
    assert_refused(
        signed(tmp_path / "bomb", packed(big, {"files": listed})), there, "of 67108864 bytes where its index"
    )
    index = zstandard.ZstdCompressor().compress(tarfile.TarInfo("x").tobuf()[:100] + bytes(64 << 20))
    assert_refused(signed(tmp_path / "bomb", index), there, "is damaged")


def test_contents_that_are_not_what_the_index_says_are_refused(bundle, tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    _, files = parts_of(bundle)
    index = json.loads(files.pop(INDEX))
    name = f"entries/{KEY}/library.so"
    changed = {**files, name: files[name][::-1]}
    assert_refused(signed(tmp_path / "x", packed(changed, index)), there, "is not what its index says")
    assert_refused(signed(tmp_path / "x", packed(changed)), there, "does not have the files that its manifest lists")
    del changed[name]
    assert_refused(signed(tmp_path / "x", packed(changed)), there, "does not have the files that its manifest lists")
    moved = {key.replace(KEY, "99" * 32): data for key, data in files.items()}
    assert_refused(signed(tmp_path / "x", packed(moved)), there, "does not have the files that its manifest lists")
    newer = {**files, f"entries/{KEY}/manifest.json": files[f"entries/{KEY}/manifest.json"].replace(b": 1,", b": 2,")}
    assert_refused(signed(tmp_path / "x", packed(newer)), there, "has format 2, this version reads 1")
    tail = zstandard.ZstdCompressor().compress(
        zstandard.ZstdDecompressor().decompressobj().decompress(packed(files)) + b"more"
    )
    assert_refused(signed(tmp_path / "x", tail), there, "goes on where it should end")
    cut = zstandard.ZstdDecompressor().decompressobj().decompress(packed(files))[:-1536]
    cut = zstandard.ZstdCompressor().compress(cut)
    assert_refused(signed(tmp_path / "x", cut), there, "ends too early|is not what its index says")
    assert_refused(signed(tmp_path / "x", b"no zstd at all"), there, "is not compressed as it should be")


def read_while_it_changes(bundle):
    with open_bundle(bundle, shared_key(), 1 << 30) as opened:
        for count, (_, data) in enumerate(opened.members):
            data.read()
            if not count:
                with bundle.open("r+b") as file:
                    file.seek(-3, os.SEEK_END)
                    file.write(b"\0\0\0")


def test_a_file_that_changes_while_it_is_read_is_refused(store, tmp_path):
    put(store, files={"graph.txt": b"graph", "library.so": os.urandom(2 << 20)})
    export_bundle(tmp_path / "b", store)
    with pytest.raises(BundleError, match=r"was changed while it was read|is not compressed as it should be"):
        read_while_it_changes(tmp_path / "b")


def test_an_import_that_is_not_taken_leaves_nothing_and_says_so(bundle, tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    monkeypatch.setattr(
        "k31compile.cache.publish.os.rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.warns(UserWarning, match="was not kept: No space left"):
        received = import_bundle(bundle, there)
    assert sorted(received.failed) == [KEY, OTHER]
    assert not there.places.entry_keys()
    assert not left_over(there)


def test_a_full_disk_is_seen_before_anything_is_unpacked(bundle, tmp_path, monkeypatch):
    there = other_machine(monkeypatch, tmp_path)
    monkeypatch.setattr("k31compile.bundle.receive.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    assert_refused(bundle, there, "1048576 are free .*make room")


def test_a_broken_entry_is_left_out_and_named(store, tmp_path):
    put(store)
    put(store, OTHER, {**INGREDIENTS, "inputs": "t0 [9]"})
    (store.places.entries / KEY / "graph.txt").write_bytes(b"other")
    with pytest.warns(UserWarning, match="is set aside"):
        sent = export_bundle(tmp_path / "b", store)
    assert sent.entries == (OTHER,)
    assert list(sent.left_out) == [KEY]


def test_parts_travel_and_are_signed_anew(store, tmp_path, monkeypatch):
    kept: dict[str, bytes] = {"functions/f-1.signed": b"what was confirmed", "functions/" + "g" * 120: b"long"}
    taken: dict[str, bytes] = {}
    there = Part("functions", lambda: iter(sorted(kept.items())), taken.__setitem__, 1 << 10)
    monkeypatch.setattr("k31compile.bundle.send.PARTS", (there,))
    monkeypatch.setattr("k31compile.bundle.receive.PARTS", (there,))
    monkeypatch.setattr(parts, "PARTS", (there,))
    put(store)
    sent = export_bundle(tmp_path / "b", store)
    assert (dict(sent.parts), list(sent.left_out)) == ({"functions": 1}, ["functions/" + "g" * 120])
    other = other_machine(monkeypatch, tmp_path)
    assert import_bundle(tmp_path / "b", other).parts == {"functions": {"new": 0, "present": 1}}
    assert not taken
    kept.clear()
    assert import_bundle(tmp_path / "b", other).parts == {"functions": {"new": 1, "present": 0}}
    assert taken == {"functions/f-1.signed": b"what was confirmed"}


def test_kernels_travel_and_are_believed_without_a_compiler(store, tmp_path, monkeypatch):
    """What stands for the library is no code: whether it is believed is decided before it is loaded."""
    library = b"\x7fELF" + bytes(5000)
    folder = build._private_folder()
    path = folder / f"cpu-{build.build_key('fast')}.so"
    path.write_bytes(library + build._seal_line({"sha256": hashlib.sha256(library).hexdigest(), "compiler": "g++ 1"}))
    path.chmod(0o600)
    put(store)
    export_bundle(tmp_path / "b", store)
    other = other_machine(monkeypatch, tmp_path)
    received = import_bundle(tmp_path / "b", other)
    assert received.parts["kernels"] == {"new": 1, "present": 0}
    assert import_bundle(tmp_path / "b", other).parts["kernels"] == {"new": 0, "present": 1}
    monkeypatch.setenv("PATH", "/nowhere")
    found = build.built_library()
    assert found.parent == tmp_path / "other" / "kernels"
    assert found.read_bytes().startswith(library)
    _, files = parts_of(tmp_path / "b")
    bad = {name: data for name, data in files.items() if name != INDEX}
    kernels = next(name for name in bad if name.startswith("kernels/"))
    bad[kernels] = bad[kernels].replace(b"\x7fELF", b"\x7fELG")
    third = other_machine(monkeypatch, tmp_path, "third")
    assert "holds no kernels" in import_bundle(signed(tmp_path / "c", packed(bad)), third).failed[kernels]


def test_the_stream_is_what_zstd_calls_one(bundle):
    assert zstandard.get_frame_parameters(bundle.read_bytes()[85:]).has_checksum
    assert io.BytesIO(bundle.read_bytes()).read(4) == b"\x5b\x2a\x4d\x18"
