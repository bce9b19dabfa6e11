"""What one process confirmed serves the next; what cannot be believed is named and confirmed anew."""

import itertools
import json
import os
import re

import pytest
import torch
from captured import sketch

from k31compile.errors import StoreError
from k31compile.graph import confirm, memory
from k31compile.graph.confirm import byte_budget
from k31compile.graph.memory import MEMORY, Memory, Place, Verdict, exported, imported, remembering
from k31compile.graph.portable import NotPortable, from_plain, portable, to_plain
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.gated_rms_norm import GatedRMSNormRecogniser
from k31compile.passes.recognise.visibility import Visibility
from k31compile.signatures import sign

KEY = b"this user's key, which is no one"


def norm(eps=1e-6, gate=torch.sigmoid):
    def program(x, g, w):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w * gate(g)

    return program


def wrong(x, g, w):
    return norm(gate=lambda opened: torch.sigmoid(opened).clamp(max=0.9))(x, g, w)


@pytest.fixture
def runs(monkeypatch):
    """How many readings were run."""
    count = []
    plain = confirm._confirm_one
    monkeypatch.setattr(confirm, "_confirm_one", lambda reading: count.append(reading) or plain(reading))
    return count


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.setattr("k31compile.signed_file.local_key", lambda: KEY)
    MEMORY.forget()
    yield memory._folder()
    MEMORY.forget()


def compiled(program=None, stored=True, new_process=True):
    """The findings of one compile; of a new process, but for what lies in files, unless said otherwise."""
    if new_process:
        MEMORY.forget()
    module = sketch(program or norm(), torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)).module
    with remembering(stored):
        return recognise(module, GatedRMSNormRecogniser())


def the_file(folder):
    (path,) = folder.glob("*.signed")
    return path


def test_the_next_process_runs_nothing(runs, folder):
    (first,) = compiled().confirmations
    assert (len(runs) > 0, first.remembered) == (True, False)
    assert first.to_dict()["text"] == f"confirmed on {first.samples} samples in float64"
    assert the_file(folder).stat().st_mode & 0o777 == 0o600
    runs.clear()
    (again,) = compiled().confirmations
    assert runs == []
    assert again.to_dict() == {
        **first.to_dict(),
        "remembered": True,
        "text": f"remembered: confirmed on {first.samples} samples in float64 before",
    }
    (third,) = compiled(new_process=False).confirmations
    assert (runs, third.remembered) == ([], True)


def test_a_refusal_is_remembered_with_its_reason(runs):
    (first,) = compiled(wrong).refused
    assert len(runs) > 0
    runs.clear()
    (again,) = compiled(wrong).refused
    assert runs == []
    assert again.reason == first.reason


def test_another_region_is_confirmed_by_itself(runs):
    compiled()
    runs.clear()
    assert compiled(norm(gate=torch.nn.functional.silu)).fused == 1
    assert len(runs) > 0
    runs.clear()
    assert compiled(norm(eps=1e-5)).fused == 1
    assert len(runs) > 0


def test_without_the_cache_nothing_is_read_and_nothing_written(runs, folder):
    assert compiled(stored=False).fused == 1
    assert list(folder.iterdir()) == []
    compiled()
    runs.clear()
    (confirmation,) = compiled(stored=False, new_process=False).confirmations
    assert len(runs) > 0
    assert not confirmation.remembered


def change_number(path):
    path.write_bytes(path.read_bytes().replace(b'"samples": 5', b'"samples": 6'))


def unsign(path):
    path.write_bytes(path.read_bytes().partition(b"\n")[2])


def link(path):
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def lie(path):
    """Signed by this very user, and no verdict."""
    body = b'{"format": 1, "region": "%s", "readings": {"%s": {"confirmed": {}}}}' % (b"0" * 64, b"0" * 64)
    path.write_bytes(sign(body, KEY).encode() + b"\n" + body)


DAMAGE = {
    "changed": change_number,
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "unsigned": unsign,
    "open to others": lambda path: path.chmod(0o666),
    "a link": link,
    "no verdict": lie,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_cannot_be_believed_is_named_and_made_anew(damage, runs, folder, caplog):
    (first,) = compiled().confirmations
    path = the_file(folder)
    whole = path.read_bytes()
    DAMAGE[damage](path)
    runs.clear()
    (again,) = compiled().confirmations
    assert len(runs) > 0
    assert (again, again.remembered) == (first, False)
    assert f"{path} is not used, its region is confirmed anew" in caplog.text
    assert (path.read_bytes(), path.is_symlink()) == (whole, False)
    runs.clear()
    assert compiled().fused == 1
    assert runs == []


def test_the_file_of_one_region_serves_no_other(runs, folder, caplog):
    compiled()
    first = the_file(folder)
    first.rename(folder / "kept")
    compiled(norm(gate=torch.nn.functional.silu))
    the_file(folder).unlink()
    other = (folder / "kept").read_bytes()
    compiled(wrong)
    mine = the_file(folder)
    mine.write_bytes(other)
    runs.clear()
    assert compiled(wrong).fused == 0
    assert len(runs) > 0
    assert "it is the file of another region" in caplog.text


def test_a_class_that_is_unknown_is_confirmed_anew(runs, folder, caplog):
    compiled()
    path = the_file(folder)
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    for verdict in body["readings"].values():
        if "learned" in verdict:
            verdict["learned"] = {"of": "os.system", "fields": {"command": "true"}}
    text = json.dumps(body).encode()
    path.write_bytes(sign(text, KEY).encode() + b"\n" + text)
    runs.clear()
    assert compiled().fused == 1
    assert len(runs) == 1
    assert "stands for nothing" in caplog.text


def test_what_a_machine_is_out_of_is_not_remembered(monkeypatch, runs, folder):
    def fails(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as one:
        one.setattr("k31compile.graph.confirm.run_in_float64", fails)
        assert compiled().fused == 0
    with byte_budget(1):
        assert compiled(new_process=False).fused == 0
    assert list(folder.iterdir()) == []
    assert compiled(new_process=False).fused == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_that_cannot_be_written_costs_a_warning(folder, caplog):
    folder.chmod(0o500)
    assert compiled().fused == 1
    assert "could not be kept for the next process" in caplog.text
    folder.chmod(0o700)


def test_a_full_disk_costs_a_warning_and_leaves_nothing(folder, caplog, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert compiled().fused == 1
    assert "No space left on device" in caplog.text
    assert list(folder.iterdir()) == []


def test_files_and_regions_are_bounded(monkeypatch, folder):
    monkeypatch.setattr(memory, "MOST_FILES", 2)
    monkeypatch.setattr(memory, "_MOST_IN_PROCESS", 2)
    for eps in (1e-6, 1e-5, 1e-4):
        compiled(norm(eps=eps), new_process=False)
    assert len(list(folder.glob("*.signed"))) == 2
    assert len(MEMORY.regions) == 2
    monkeypatch.setattr(memory, "MOST_READINGS", 2)
    verdicts = {f"{i:064x}": Verdict(reason="no", trials=i) for i in range(5)} | {"f" * 64: Verdict({"name": "a"})}
    kept = json.loads(memory._body("0" * 64, verdicts))["readings"]
    assert (len(kept), "f" * 64 in kept) == (2, True)


def test_what_a_key_names_by_its_place_lives_as_long_as_the_key():
    kept, thing = Memory(), object()
    kept.keep(Place("a", "b", False, (thing,)), Verdict(reason="no"))
    assert kept.held["a"] == [thing]


def test_what_is_not_portable_is_in_no_file(folder):
    place = Place("0" * 64, "1" * 64, is_portable=False)
    with remembering(stored=True):
        memory.session().keep(place, Verdict(reason="no"))
        assert memory.session().find(place) is not None
    assert list(folder.iterdir()) == []


def test_a_bundle_takes_them_to_another_machine(runs, folder, tmp_path, monkeypatch):
    compiled()
    compiled(wrong)
    bundle = dict(exported())
    assert len(bundle) == 2
    assert all(re.fullmatch("regions/[0-9a-f]{40}.signed", name) for name in bundle)
    assert bundle == dict(exported())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    monkeypatch.setattr(memory, "_folder", lambda: elsewhere)
    monkeypatch.setattr("k31compile.signed_file.local_key", lambda: KEY[::-1])
    for name, body in bundle.items():
        imported(name, body)
    assert dict(exported()) == bundle
    runs.clear()
    assert (compiled().fused, compiled(wrong).fused, runs) == (1, 0, [])
    # What is known here is not overwritten by what comes.
    name, body = next((name, body) for name, body in bundle.items() if b'"confirmed"' in body)
    imported(name, body.replace(b'"samples": 5', b'"samples": 7'))
    assert dict(exported()) == bundle


@pytest.mark.parametrize(
    "change",
    [
        lambda name, body: (name.replace("regions/", "../"), body),
        lambda name, body: ("regions/" + "0" * 40 + ".signed", body),
        lambda name, body: (name, body[:-9]),
        lambda name, body: (name, body.replace(b'"samples": 5', b'"samples": "many"')),
        lambda name, body: (name, body.replace(b'"format": 1', b'"format": 2')),
        lambda name, body: (name, body.replace(b'"trials"', b'"tries"')),
        lambda name, body: (name, b"[]"),
        lambda name, body: (name, b"\xff"),
    ],
    ids=["path", "name", "cut", "number", "format", "key", "list", "no text"],
)
def test_what_no_machine_exported_is_not_imported(change, folder):
    compiled(norm(gate=torch.nn.functional.silu))  # read as a sigmoid first
    ((name, body),) = exported()
    assert b'"confirmed"' in body
    assert b'"refused"' in body
    before = dict(exported())
    with pytest.raises(StoreError, match=r"holds no confirmed region|is not named after"):
        imported(*change(name, body))
    assert dict(exported()) == before


def test_plain_values_come_back_as_they_were():
    module = sketch(norm(), torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)).module
    leaves = module.graph.find_nodes(op="placeholder")
    values = [None, True, 1, 1.5, 1e-17, "a", (1, (True, None)), [1], {"a": leaves[2]}, torch.bfloat16]
    values.append(Visibility(None, 1, 0, everything=True))
    for value, other in itertools.product(values, repeat=2):
        plain = json.loads(json.dumps(to_plain(value, leaves)))
        back = from_plain(plain, leaves)
        assert (back, type(back)) == (value, type(value))
        if value is not other:
            assert repr(plain) != repr(to_plain(other, leaves))
    for strange in (object(), {1: 2}, torch.zeros(1), module.graph.output_node(), lambda: 1):
        with pytest.raises(NotPortable):
            to_plain(strange, leaves)
    for text in ({"leaf": 3}, {"leaf": -1}, {"dtype": "Tensor"}, {"of": "Layout", "fields": {}}, [1], {"of": "x"}):
        with pytest.raises(NotPortable):
            from_plain(text, leaves)
    with pytest.raises(TypeError):
        portable(Visibility)
