"""Processes that write, read, remove and are killed at once: an entry is there whole or not at all, without a lock."""

import os
import random
import signal
import time

import pytest
from store_cases import FILES, KEY, child, ended, left_over, put

from k31compile.cache import scratch
from k31compile.cache.verify import check_entry
from k31compile.signatures import local_key

WRITE = """
sys.stdin.readline()
warnings.simplefilter("error")
print(put(store))
"""
READ = """
warnings.simplefilter("error")
print("ready", flush=True)
seen = {"there": 0, "absent": 0}
while not Path(sys.argv[2]).exists():
    found = store.find(KEY)
    seen["there" if found else "absent"] += 1
    if found:
        for name, data in FILES.items():
            assert found.path(name).read_bytes() == data
print(seen)
"""
WRITE_AND_REMOVE = """
warnings.simplefilter("error")
for _ in range(60):
    assert put(store) is not None
    store.clear()
"""
WRITE_FOR_EVER = """
store = EntryStore(Path(sys.argv[1]), Limits(entries=int(sys.argv[3])))
data = os.urandom(8 << 20)
print("ready", flush=True)
for number in range(1000):
    put(store, f"{int(sys.argv[2]) * 1000 + number:016x}", files={"graph.txt": b"x" * 5000, "library.so": data})
"""
WAIT_IN_A_WRITE = """
print("ready", flush=True)
put(store, files={"graph.txt": b"begun", "library.so": Path(sys.argv[2])})
"""


@pytest.mark.parametrize("_round", range(3))
def test_eight_processes_write_one_entry_at_once(store, _round):
    racers = [child(WRITE, store.root) for _ in range(8)]
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = {ended(racer).strip() for racer in racers}
    assert said == {str(store.root / "entries" / KEY)}
    assert [path.name for path in (store.root / "entries").iterdir()] == [KEY]
    assert left_over(store) == []
    assert store.verify() == {KEY: ""}


def test_a_reader_never_sees_half(store, tmp_path):
    readers = [child(READ, store.root, tmp_path / "stop") for _ in range(2)]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    writers = [child(WRITE, store.root) for _ in range(3)]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        ended(writer)
    time.sleep(0.2)
    (tmp_path / "stop").touch()
    for reader in readers:
        seen = eval(ended(reader))
        assert seen["there"] > 0


def test_a_reader_survives_that_entries_leave_and_come_back(store, tmp_path):
    readers = [child(READ_IF_THERE, store.root, tmp_path / "stop") for _ in range(2)]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    ended(child(WRITE_AND_REMOVE, store.root))
    (tmp_path / "stop").touch()
    for reader in readers:
        ended(reader)
    assert left_over(store) == []


READ_IF_THERE = READ.replace(
    "assert found.path(name).read_bytes() == data",
    """
            try:
                assert found.path(name).read_bytes() == data
            except FileNotFoundError:
                pass  # it left after it was found
""",
)


@pytest.mark.parametrize("most", [1000, 2])
def test_killed_while_writing_and_removing_twenty_times(store, most):
    moments = random.Random(most)
    interrupted = 0
    for run in range(20):
        writer = child(WRITE_FOR_EVER, store.root, run, most)
        assert writer.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0.0, 0.08))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        interrupted += bool(left_over(store))
        for key in store.places.entry_keys():
            check_entry(store.root / "entries" / key, [local_key()], 5)
        assert all(len(path.name) == 16 for path in (store.root / "entries").iterdir())
        assert len(store.places.entry_keys()) <= most
    assert interrupted > 0, "no kill met a write: the moments are wrong"
    put(store)
    assert left_over(store) == []
    assert set(store.verify().values()) == {""}


def test_the_folder_of_a_living_process_stays_however_old(store, tmp_path):
    os.mkfifo(tmp_path / "endless")
    writer = child(WAIT_IN_A_WRITE, store.root, tmp_path / "endless")
    try:
        assert writer.stdout.readline() == "ready\n"
        while not left_over(store):
            time.sleep(0.01)
        (name,) = left_over(store)
        os.utime(store.places.making / name, (1, 1))
        put(store, "ab" * 32)
        store.gc()
        assert left_over(store) == [name]
    finally:
        writer.kill()
        writer.communicate()
    store.find("ab" * 32)
    store.gc()
    assert left_over(store) == []


def test_a_reader_too_removes_what_was_left(store):
    put(store)
    name = f"new.{scratch.machine_tag()}.{2**22 + 1}.17.abcdef"
    (store.places.making / name).mkdir()
    (store.places.making / name / "library.so").write_bytes(b"half")
    assert store.find(KEY) is not None
    assert left_over(store) == []


@pytest.mark.parametrize(("age", "stays"), [(60, True), (scratch.STALE_SECONDS + 60, False)])
def test_another_machine_is_given_time(store, age, stays):
    put(store)
    folder = store.places.making / "new.0123456789ab.1.17.abcdef"
    folder.mkdir()
    (folder / "library.so").write_bytes(b"half")
    then = time.time() - age
    for path in (folder / "library.so", folder):
        os.utime(path, (then, then))
    store.gc()
    assert folder.exists() == stays


def test_a_process_number_used_again_is_another_process(store):
    put(store)
    (store.places.making / f"new.{scratch.machine_tag()}.{os.getpid()}.17.abcdef").mkdir()
    store.gc()
    assert left_over(store) == []


def test_what_others_put_among_the_made_stays(store):
    put(store)
    for name in ("notes.txt", "a.b.c.d.e"):
        (store.places.making / name).write_text("mine")
    (store.places.making / "folder").mkdir()
    store.gc()
    store.clear()
    assert left_over(store) == ["a.b.c.d.e", "folder", "notes.txt"]


def test_the_sound_entry_of_a_faster_process_is_given_back(store, monkeypatch):
    """Two processes find an entry broken; the slower one must not set aside what the faster one wrote instead."""
    (put(store) / "library.so").write_bytes(b"")
    told = []
    monkeypatch.setattr("k31compile.cache.entry_store._warn", told.append)
    set_aside = store.places.set_aside

    def late(key):
        set_aside(key)
        monkeypatch.setattr(store.places, "set_aside", set_aside)
        put(store)
        return set_aside(key)

    monkeypatch.setattr(store.places, "set_aside", late)
    found = store.find(KEY)
    assert found is not None
    assert found.path("library.so").read_bytes() == FILES["library.so"]
    assert told == []
