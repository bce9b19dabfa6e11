"""Row D4 of the bug list: code that was kept for one set of operators or versions is not used for another."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import fresh_cache

import k31compile
from k31compile.cache import surroundings


def index(query, key, weights):
    """A lightning indexer as it is written."""
    dots = torch.relu(torch.einsum("bthd,bsd->bths", query, key))
    scores = (weights.unsqueeze(-1) * dots).sum(2)
    return scores.topk(4, dim=-1).indices


_DRAW = torch.Generator().manual_seed(0)
INPUTS = tuple(torch.randn(sizes, generator=_DRAW) for sizes in ((2, 1, 3, 8), (2, 32, 8), (2, 1, 3)))


def run(folder, program=index, inputs=INPUTS, **options):
    """The result, what was fused, and whether the graph was in the cache."""
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(program, backend="k31", options={"cache": folder, **options})(*inputs)
    report = k31compile.last_report()
    return result, dict(report.fused), report.cache["hit"]


def same_places(one, other):
    return torch.equal(one.sort(-1).values.long(), other.sort(-1).values.long())


def test_options_and_versions_are_never_mixed_up(monkeypatch, tmp_path):
    expected = index(*INPUTS)
    with fresh_cache():
        result, fused, hit = run(tmp_path)
        assert (fused, hit) == ({"lightning_indexer": 1}, False)
        assert same_places(result, expected)
        result, fused, hit = run(tmp_path, fuse=[])
        assert (fused, hit) == ({}, False)
        assert same_places(result, expected)
        for options, names in (({}, {"lightning_indexer": 1}), ({"fuse": []}, {})):
            result, fused, hit = run(tmp_path, **options)
            assert (fused, hit) == (names, True)
            assert same_places(result, expected)
        monkeypatch.setattr(surroundings, "available", lambda: (False, "switched off"))
        assert run(tmp_path)[1:] == ({"lightning_indexer": 1}, False)
        monkeypatch.undo()
        monkeypatch.setattr(surroundings, "_npu_version", lambda target: "2.13.0")
        assert run(tmp_path, fuse=[])[1:] == ({}, False)


def lengths(x, cache):
    """Two sizes that are dynamic, a write, and an output that is a view of what was written."""
    cache[:, : x.shape[1]] = x * 2
    return x.sum(1) * x.shape[1], cache[:, : x.shape[1]]


def drawn(length, width=16):
    return torch.randn(2, length, 4, generator=_DRAW), torch.zeros(2, width, 4)


def test_a_dynamic_graph_is_found_again_and_guards_on_what_it_was_built_for(tmp_path):
    for hit in (False, True):
        torch._dynamo.reset()
        call = torch.compile(lengths, backend="k31", dynamic=True, options={"cache": tmp_path})
        for length in (5, 9, 16, 3):
            x, cache = drawn(length)
            _, expected_cache = x, cache.clone()
            expected = lengths(x, expected_cache)
            with torch.no_grad():
                got = call(x, cache)
            torch.testing.assert_close(got[0], expected[0])
            torch.testing.assert_close(cache, expected_cache)
            assert got[1].data_ptr() == cache.data_ptr()
        assert k31compile.last_report().cache["hit"] is hit


def many(x):
    return (x.sin() + 1, x.cos() * 2)


def test_what_is_broken_is_named_and_built_again(tmp_path):
    (x,) = (torch.randn(5, generator=_DRAW),)
    run(tmp_path, many, (x,))
    (library,) = tmp_path.glob("entries/*/library.so")
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    with pytest.warns(UserWarning, match=library.parent.name[:12]):
        result, _, hit = run(tmp_path, many, (x,))
    assert not hit
    torch.testing.assert_close(result, many(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run(tmp_path, many, (x,))[2]


def test_a_cold_compile_that_must_not_be_says_what_differs(tmp_path):
    x = torch.randn(5, generator=_DRAW)
    run(tmp_path, many, (x,))
    assert run(tmp_path, many, (x,), require_warm=True)[2]
    with pytest.raises(Exception, match=r"this graph is not in the cache: nearest entry .*: inputs differ") as raised:
        run(tmp_path, many, (x.double(),), require_warm=True)
    assert "K31-0504" in str(raised.value)


_AGAIN = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import subprocess
def refuse(*args, **kwargs): raise AssertionError(f"a process was started: {args[0]}")
if sys.argv[3] == "warm":
    subprocess.Popen.__init__ = refuse
from model import model
torch.manual_seed(0)
with torch.no_grad():
    out = torch.compile(model, backend="k31", options={"cache": sys.argv[2]})(torch.ones(2, 8))
import k31compile
report = k31compile.last_report()
loaded = sorted(name for name in ("torch._inductor.compile_fx", "k31compile.passes.pipeline") if name in sys.modules)
print(report.cache["hit"], loaded, out.sum().item())
"""

_MODEL = """
import torch
def model(x):
    return (x.softmax(-1) * FACTOR).sum(-1)
FACTOR = 2.0
"""


def test_another_process_compiles_nothing_and_sees_a_global_that_changed(tmp_path):
    """Rows D1 and D10: no process, no Inductor, no pass; and never the old body."""
    (tmp_path / "model.py").write_text(_MODEL)
    (tmp_path / "again.py").write_text(_AGAIN)

    def start(how):
        command = [sys.executable, "-P", "again.py", str(tmp_path), str(tmp_path / "cache"), how]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)

    cold = start("cold")
    assert cold.stdout.startswith("False"), cold.stderr
    first = start("warm")
    assert first.stdout.split("\n")[0] == "True [] 4.0", first.stderr
    path = Path(tmp_path / "model.py")
    path.write_text(path.read_text().replace("2.0", "3.0"))
    second = start("warm")
    assert "a process was started" in second.stderr, "the changed model must be compiled anew"


def test_stand_ins_that_another_process_has_built_meanwhile_are_taken(monkeypatch, tmp_path):
    from k31compile.targets.ascend.offline import stubs

    def build(package, work):
        """The other process puts its folder in place while this one still builds."""
        (work / stubs.MAIN).write_bytes(b"mine")
        folder = tmp_path / work.name
        folder.mkdir()
        (folder / stubs.MAIN).write_bytes(b"theirs")

    monkeypatch.setattr(stubs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(stubs, "_package_folder", lambda: tmp_path)
    monkeypatch.setattr(stubs, "_build", build)
    monkeypatch.setattr(stubs.importlib.metadata, "version", lambda _: "2.13.0")
    folder = stubs.built_stubs()
    assert (folder / stubs.MAIN).read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [folder], "nothing is left over"


@pytest.mark.parametrize("changed", ["2.13.1", "2.13.0"])
def test_stand_ins_for_cann_are_kept_by_version(changed, monkeypatch, tmp_path):
    from k31compile.targets.ascend.offline import stubs

    built = []
    monkeypatch.setattr(stubs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(stubs, "_package_folder", lambda: tmp_path)
    monkeypatch.setattr(stubs, "_build", lambda package, work: (built.append(1), (work / stubs.MAIN).write_bytes(b"")))
    monkeypatch.setattr(stubs.importlib.metadata, "version", lambda _: "2.13.0")
    first = stubs.built_stubs()
    monkeypatch.setattr(stubs.importlib.metadata, "version", lambda _: changed)
    assert (stubs.built_stubs() == first) == (changed == "2.13.0")
    assert len(built) == (1 if changed == "2.13.0" else 2)


def scaled(x, factor):
    return x * factor + 1


@pytest.mark.slow
def test_a_number_that_arrives_as_a_symbol_is_never_taken_for_another(tmp_path):
    """Dynamo hands on a float that changes as a tensor, and a trace makes it the number that it is at that call."""
    x, hits = torch.arange(3.0), []
    for factors in ((1.5,), (1.5, 2.5)):
        torch._dynamo.reset()
        compiled = torch.compile(scaled, backend="k31", dynamic=True, options={"cache": tmp_path})
        for factor in factors:
            with torch.no_grad():
                torch.testing.assert_close(compiled(x, factor), scaled(x, factor))
            hits.append(k31compile.last_report().cache["hit"])
    assert hits == [False, True, False]


def added_at(x, rows):
    x.index_add_(0, torch.tensor([0, 2]), rows)
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.slow
def test_a_graph_with_constant_indices_is_kept(tmp_path):
    """AOTInductor would not have a real tensor beside the inputs, which are none, in one operator."""
    for is_kept in (False, True):
        x, other, rows = torch.ones(3, 4), torch.ones(3, 4), torch.arange(8.0).view(2, 4)
        result, _, hit = run(tmp_path, added_at, (x, rows))
        torch.testing.assert_close(result, added_at(other, rows))
        assert torch.equal(x, other)
        assert hit is is_kept
