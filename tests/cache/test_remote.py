"""The second tier: asked on a miss, given what is new, checked before it is written, and never waited for long."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings

import fsspec
import pytest
from store_cases import FILES, KEY, OTHER, left_over, put

from k31compile.cache import remote as remote_module
from k31compile.cache.entry_store import default_store
from k31compile.cache.opened import open_store
from k31compile.cache.remote import Remote, TieredStore
from k31compile.cache.shared_kernels import kernels_key, offer_kernels
from k31compile.errors import OptionError, StoreError
from k31compile.kernels.cpu import build, loader

SECRET = "a secret of two machines"
needs_s3 = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("moto", "flask", "s3fs")),
    reason="pip install moto[server] s3fs",
)


@pytest.fixture(autouse=True)
def _shared(monkeypatch):
    monkeypatch.setenv("K31_CACHE_KEY", SECRET)
    for name in ("K31_REMOTE_TIMEOUT", "K31_REMOTE_WRITE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(tmp_path):
    """machine("a", url): the store of a machine of that name, with a folder of its own."""
    return lambda name, url: TieredStore(tmp_path / name, Remote(url))


@pytest.fixture
def shelf(tmp_path):
    """A folder that machines share, as a URL."""
    return f"file://{tmp_path}/shelf"


def stored(tmp_path):
    return sorted(path for path in (tmp_path / "shelf").rglob("*") if path.is_file())


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=needs_s3)])
def url(request, shelf):
    if request.param == "s3":
        return request.getfixturevalue("bucket")
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        return "memory://cache"
    return shelf


@pytest.fixture(scope="session")
def s3_server():
    """A server of moto's on loopback, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    server = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(s3_server, monkeypatch):
    options = {
        "endpoint_url": s3_server,
        "key": "nobody",
        "secret": "nothing",
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    name = f"b{os.getpid()}-{time.monotonic_ns()}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}/team/cache"


def test_what_one_machine_makes_another_finds(machine, url):
    a, b = machine("a", url), machine("b", url)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert a.find(KEY) is None
        assert put(a) == a.root / "entries" / KEY
        found = b.find(KEY)
        assert {name: found.path(name).read_bytes() for name in FILES} == FILES
        assert found.folder == b.root / "entries" / KEY
        assert b.find(OTHER) is None
    assert left_over(b) == []
    assert b.verify() == {KEY: ""}
    one, two = (store.root / "entries" / KEY / "manifest.json" for store in (a, b))
    assert one.read_bytes() == two.read_bytes()


def test_what_is_here_is_not_asked_for(machine, url, monkeypatch):
    a = machine("a", url)
    put(a)
    monkeypatch.setattr(Remote, "fetch", lambda *_: pytest.fail("asked"))
    assert a.find(KEY) is not None


def test_what_broke_here_comes_back_from_there(machine, url):
    a = machine("a", url)
    (put(a) / "library.so").write_bytes(b"")
    with pytest.warns(UserWarning, match="set aside"):
        found = a.find(KEY)
    assert found.path("library.so").read_bytes() == FILES["library.so"]


def test_what_was_changed_there_is_named_and_not_written_here(machine, url):
    put(machine("a", url))
    b = machine("b", url)
    system, path = fsspec.core.url_to_fs(b.remote.name_of(KEY))
    data = system.cat_file(path)
    for changed in (data[: len(data) // 2], b"", data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]):
        system.pipe_file(path, changed)
        with pytest.warns(
            UserWarning, match=f"entry {KEY[:12]} of the remote cache is not used: .*{KEY}.entry"
        ) as told:
            assert b.find(KEY) is None
        assert len(told) == 1
        assert not b.places.entries.exists()
    put(b)
    assert system.cat_file(path) == data


def test_an_entry_under_anothers_name_is_refused(machine, url):
    put(machine("a", url))
    b = machine("b", url)
    system, path = fsspec.core.url_to_fs(b.remote.name_of(KEY))
    system.pipe_file(fsspec.core.url_to_fs(b.remote.name_of(OTHER))[1], system.cat_file(path))
    with pytest.warns(UserWarning, match=f"entry {OTHER[:12]} of the remote cache is not used: its signature"):
        assert b.find(OTHER) is None


def test_other_secrets_do_not_meet(machine, url, monkeypatch):
    put(machine("a", url))
    monkeypatch.setenv("K31_CACHE_KEY", "a secret of other people")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert machine("b", url).find(KEY) is None


def test_nothing_half_written_lies_there(machine, shelf, tmp_path, monkeypatch):
    a = machine("a", shelf)
    put(a)
    (path,) = stored(tmp_path)
    assert path.name == f"{KEY}.entry"
    local = type(fsspec.filesystem("file"))

    def fail(*_args, **_more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local, "mv", fail)
    with pytest.warns(
        UserWarning, match=r"is given nothing more.*failed when it was given entry 77aa.*No space left"
    ) as told:
        assert put(a, OTHER) is not None
    assert len(told) == 1
    assert stored(tmp_path) == [path]
    assert a.find(OTHER) is not None
    a.clear()
    assert a.find(KEY) is not None, "it is still read"


def test_it_may_be_read_only(machine, url, monkeypatch):
    monkeypatch.setenv("K31_REMOTE_WRITE", "0")
    put(machine("a", url))
    assert machine("b", url).find(KEY) is None
    monkeypatch.delenv("K31_REMOTE_WRITE")
    put(machine("c", url))
    assert machine("b", url).find(KEY) is not None


def look_for_many(store):
    for number in range(50):
        assert store.find(f"{number:064x}") is None


def test_a_dead_one_costs_the_stated_wait_and_one_warning(machine, shelf, monkeypatch):
    monkeypatch.setenv("K31_REMOTE_TIMEOUT", "0.3")
    monkeypatch.setattr(Remote, "_read", lambda *_: time.sleep(60))
    a = machine("a", shelf)
    begin = time.monotonic()
    with pytest.warns(UserWarning, match=r"did not answer within 0.3 s when it was asked for entry 0000") as told:
        look_for_many(a)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert put(a) is not None
        assert a.find(KEY) is not None
    assert time.monotonic() - begin < 1.5


def test_a_slow_one_costs_the_stated_wait_together(machine, shelf, monkeypatch):
    monkeypatch.setenv("K31_REMOTE_TIMEOUT", "0.5")
    monkeypatch.setattr(Remote, "_read", lambda *_: time.sleep(0.2))
    a = machine("a", shelf)
    begin = time.monotonic()
    with pytest.warns(
        UserWarning,
        match=r"is not used any more by this process, (waiting for it took 0.5 s together|it did not answer)",
    ) as told:
        look_for_many(a)
    assert time.monotonic() - begin < 1.5
    assert len(told) == 1


def test_slow_writes_cost_the_stated_wait_together_unless_asked_for(machine, shelf, monkeypatch):
    monkeypatch.setenv("K31_REMOTE_TIMEOUT", "0.5")
    monkeypatch.setattr(Remote, "_write", lambda *_: time.sleep(0.2) or b"done")
    a = machine("a", shelf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("K31_REMOTE_WRITE", "0")
        local = machine("a", shelf)
        assert all(put(local, f"{number:064x}") for number in range(6))
        assert all(local.push(f"{number:064x}", is_asked_for=True) for number in range(6))
    begin = time.monotonic()
    with pytest.warns(
        UserWarning, match=r"is not used any more by this process, (waiting for it took 0.5 s|it did not)"
    ):
        put_many(a)
    assert time.monotonic() - begin < 2


def put_many(store):
    for number in range(20):
        assert put(store, f"{100 + number:064x}") is not None


def test_a_port_where_nobody_answers(machine, monkeypatch):
    """A server that takes connections and never says a word, asked over HTTP as it is."""
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("K31_REMOTE_TIMEOUT", "1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        a = machine("a", f"http://127.0.0.1:{silent.getsockname()[1]}/cache")
        begin = time.monotonic()
        with pytest.warns(UserWarning, match="did not answer within 1 s"):
            assert a.find(KEY) is None
        assert time.monotonic() - begin < 3
        assert put(a) is not None


@needs_s3
def test_a_store_that_is_down(machine, bucket, monkeypatch):
    monkeypatch.setenv("K31_REMOTE_TIMEOUT", "3")
    options = dict(fsspec.config.conf["s3"], endpoint_url="http://127.0.0.1:9")
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    a = machine("a", bucket)
    begin = time.monotonic()
    with pytest.warns(UserWarning, match="is not used any more by this process"):
        assert a.find(KEY) is None
    assert time.monotonic() - begin < 6
    assert put(a) is not None


@needs_s3
def test_a_bucket_that_is_not_there(machine, bucket):
    a = machine("a", "s3://no-such-bucket-of-ours/cache")
    assert a.find(KEY) is None
    with pytest.warns(UserWarning, match="failed when it was given entry"):
        assert put(a) is not None


def test_a_process_ends_although_the_remote_hangs(shelf, tmp_path):
    code = """
import sys, time, warnings
from pathlib import Path
from k31compile.cache.remote import Remote, TieredStore
Remote._read = lambda *_: time.sleep(600)
print(TieredStore(Path(sys.argv[1]), Remote(sys.argv[2])).find("ab" * 32))
"""
    begin = time.monotonic()
    environment = os.environ | {"K31_REMOTE_TIMEOUT": "0.2"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a"), shelf],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "None\n", done.stderr
    assert time.monotonic() - begin < 30


def test_without_the_shared_key_there_is_no_remote(shelf, monkeypatch):
    monkeypatch.delenv("K31_CACHE_KEY")
    with pytest.raises(StoreError, match=r"K31_CACHE_KEY is not set.*set K31_CACHE_KEY to the same secret"):
        Remote(shelf)


def test_a_url_that_is_none():
    with pytest.raises(
        StoreError, match=r"no kind of store is called 'sthree' \(sthree://x\); give a path or an fsspec URL"
    ):
        Remote("sthree://x")


def test_the_timeout_is_checked(shelf, monkeypatch):
    assert remote_module.timeout_seconds() == 5
    for text in ("soon", "0", "-1", "nan", "1e9"):
        monkeypatch.setenv("K31_REMOTE_TIMEOUT", text)
        with pytest.raises(OptionError, match=f"K31_REMOTE_TIMEOUT does not take '{text}'; it takes seconds"):
            Remote(shelf)


def test_a_package_that_is_missing_is_named(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    a = machine("a", "s3://bucket/cache")
    with pytest.warns(UserWarning, match=r"failed when it was asked.*[Ii]nstall s3fs"):
        assert a.find(KEY) is None


def test_kernels_that_one_machine_built_serve_another(machine, url, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "build_key", lambda variant: "ab" * 16)
    monkeypatch.setattr(build, "built_library", build.kept_at)
    a, b = machine("a", url), machine("b", url)
    assert not offer_kernels(b)
    build.kept_at("fast").parent.mkdir(parents=True)
    build.kept_at("fast").write_bytes(b"the kernels of a")
    assert put(a) is not None
    assert set(a.places.entry_keys()) == {KEY, kernels_key()}
    assert not offer_kernels(a), "it has its own"

    adopted = []
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "user of b"))
    monkeypatch.setattr(loader, "adopt", lambda path, variant: adopted.append((path.read_bytes(), variant)))
    monkeypatch.setenv("K31_CPU_KERNELS", "0")
    assert not offer_kernels(b)
    monkeypatch.delenv("K31_CPU_KERNELS")
    assert offer_kernels(b)
    assert adopted == [(b"the kernels of a", "fast")]
    monkeypatch.setattr(build, "build_key", lambda variant: "cd" * 16)
    assert not offer_kernels(b), "other sources or another machine"


def test_kernels_that_do_not_load_are_told(machine, shelf, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "build_key", lambda variant: "ab" * 16)
    monkeypatch.setattr(loader, "_LOADED", {})
    a = machine("a", shelf)
    assert a.publish(kernels_key(), "kernels", {}, {}, {}, {"kernels.so": b"no library"}) is not None
    with pytest.warns(UserWarning, match=r"the kernels in .* are not used: .*do not load"):
        assert not offer_kernels(a)


def test_the_option_opens_it(shelf, tmp_path):
    store = open_store(shelf)
    assert isinstance(store, TieredStore)
    assert store.root == default_store().root
    assert open_store(shelf) is store
    assert not isinstance(open_store(str(tmp_path / "plain")), TieredStore)
    put(store)
    shutil.rmtree(store.root)
    assert store.find(KEY) is not None
    assert json.loads((store.root / "entries" / KEY / "manifest.json").read_text())["key"] == KEY
