"""Row D4 of the bug list: code that was kept for one set of operators or versions is not used for another."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import k31compile


def index(query, key, weights):
    """A lightning indexer as it is written."""
    dots = torch.relu(torch.einsum("bthd,bsd->bths", query, key))
    scores = (weights.unsqueeze(-1) * dots).sum(2)
    return scores.topk(4, dim=-1).indices


_DRAW = torch.Generator().manual_seed(0)
INPUTS = tuple(torch.randn(sizes, generator=_DRAW) for sizes in ((2, 1, 3, 8), (2, 32, 8), (2, 1, 3)))


def run(**options):
    """The result, what was fused, and how many graphs Inductor took from its cache and how many it made."""
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        result = torch.compile(index, backend="k31", options=options)(*INPUTS)
    found = counters["inductor"]
    return result, k31compile.last_report().fused, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def same_places(one, other):
    return torch.equal(one.sort(-1).values.long(), other.sort(-1).values.long())


def test_options_and_versions_are_never_mixed_up(monkeypatch):
    expected = index(*INPUTS)
    with fresh_cache():
        result, fused, hits, misses = run()
        assert (dict(fused), hits, misses) == ({"lightning_indexer": 1}, 0, 1)
        assert same_places(result, expected)
        result, fused, hits, misses = run(fuse=[])
        assert (dict(fused), hits, misses) == ({}, 0, 1)
        assert same_places(result, expected)
        result, fused, hits, misses = run()
        assert (dict(fused), hits, misses) == ({"lightning_indexer": 1}, 1, 0)
        assert same_places(result, expected)
        monkeypatch.setattr(torch._inductor.codecache, "torch_key", lambda: b"another torch")
        _, fused, hits, misses = run()
        assert (dict(fused), hits, misses) == ({"lightning_indexer": 1}, 0, 1)


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
