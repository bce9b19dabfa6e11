"""choice="measured": the faster build of a graph runs, once measured and kept; a measurement leaves nothing behind."""

import pytest
import torch
from torch._inductor.utils import fresh_cache

import k31compile
from k31compile.captured import captured_call
from k31compile.errors import OptionError
from k31compile.options import Options
from k31compile.report import Report
from k31compile.targets import measured
from k31compile.targets.measured import FUSED, WRITTEN, Candidate, Measured, in_turns, with_copies

KEYS = torch.randn(2, 32, 8, generator=torch.Generator().manual_seed(0))


def step(query, key, weights, cache, place):
    """A key joins its cache, then a lightning indexer as it is written."""
    cache.index_copy_(1, place, key)
    dots = torch.relu(torch.einsum("bthd,bsd->bths", query, cache))
    scores = (weights.unsqueeze(-1) * dots).sum(2)
    return scores.topk(4, dim=-1).indices


def inputs():
    generator = torch.Generator().manual_seed(1)
    sizes = (2, 1, 3, 8), (2, 1, 8), (2, 1, 3)
    return [torch.randn(size, generator=generator) for size in sizes]


def run(folder, **options):
    """What came out, the cache after it, and the report."""
    torch._dynamo.reset()
    cache = KEYS.clone()
    with torch.no_grad():
        result = torch.compile(step, backend="k31", options={"cache": folder, "choice": "measured", **options})(
            *inputs(), cache, torch.tensor([7])
        )
    return result.sort(-1).values.long(), cache, k31compile.last_report()


def expected():
    cache = KEYS.clone()
    return step(*inputs(), cache, torch.tensor([7])).sort(-1).values, cache


@pytest.mark.parametrize("taken", [FUSED, WRITTEN])
def test_the_faster_one_runs_and_is_kept(monkeypatch, tmp_path, taken):
    timed = []

    def slower(calls, given):
        timed.append(in_turns(calls, given))
        return {name: 1.0 if name == taken else 2.0 for name in calls}

    monkeypatch.setattr(measured, "in_turns", slower)
    right, cache_after = expected()
    with fresh_cache():
        for is_hit in (False, True):
            result, cache, report = run(str(tmp_path))
            assert torch.equal(result, right)
            assert torch.equal(cache, cache_after)
            assert report.cache["hit"] is is_hit
            assert [choice["taken"] for choice in report.choice] == [taken]
            assert report.fused == ({"lightning_indexer": 1} if taken == FUSED else {})
            assert ("as it was written" in " ".join(report.notes)) is (taken == WRITTEN)
            assert f"runs as {taken}" in str(report)
    assert len(timed) == 1
    assert set(timed[0]) == {FUSED, WRITTEN}
    assert all(seconds > 0 for seconds in timed[0].values())


def test_without_a_cache_it_is_measured_again(monkeypatch):
    counted = []
    monkeypatch.setattr(measured, "in_turns", lambda calls, given: counted.append(1) or dict.fromkeys(calls, 1.0))
    with fresh_cache():
        for _ in range(2):
            result, cache, report = run(False)
            assert torch.equal(result, expected()[0])
            assert torch.equal(cache, expected()[1])
            assert report.choice[0]["taken"] == FUSED  # equally fast: fusions also save memory
    assert len(counted) == 2


def test_a_plain_compile_is_not_answered_by_a_measured_one(monkeypatch, tmp_path):
    monkeypatch.setattr(measured, "in_turns", lambda calls, given: {FUSED: 2.0, WRITTEN: 1.0})
    with fresh_cache():
        assert run(str(tmp_path))[2].fused == {}
        assert run(str(tmp_path), choice="fused")[2].fused == {"lightning_indexer": 1}


def test_where_the_other_cannot_be_built_the_fused_one_runs(monkeypatch, tmp_path):
    real = measured.both_or_fused

    def broken(build, *rest):
        def only_fused(is_fused):
            if not is_fused:
                raise RuntimeError("no such thing")
            return build(True)

        return real(only_fused, *rest)

    monkeypatch.setattr(measured, "both_or_fused", broken)
    with fresh_cache():
        result, _, report = run(str(tmp_path))
        assert torch.equal(result, expected()[0])
        assert report.fused == {"lightning_indexer": 1}
        assert not report.choice
        assert "nothing to compare with" in " ".join(report.notes)
        assert run(str(tmp_path))[2].cache["hit"]


def test_copies_share_what_the_inputs_share_and_nothing_else():
    pool = torch.arange(40.0)
    inputs = [pool[4:24].view(4, 5)[:, 1:4], pool[30:], torch.ones(3), 5, torch.zeros(2)]
    made = with_copies(inputs, [0])
    for one, copy in zip(inputs, made, strict=True):
        assert copy is one or (torch.equal(copy, one) and copy.stride() == one.stride())
    made[0].fill_(-1)
    assert torch.equal(pool, torch.arange(40.0))
    assert made[1].untyped_storage().data_ptr() == made[0].untyped_storage().data_ptr()
    assert made[2] is inputs[2]
    assert made[4] is inputs[4]


def test_only_the_first_call_measures():
    calls = []
    candidates = {
        name: Candidate(
            lambda x, name=name: calls.append(name) or x + 1, lambda name=name: calls.append(f"keep {name}")
        )
        for name in (FUSED, WRITTEN)
    }
    report = Report(fused={"short_conv": 1})
    program = Measured(candidates, [], report)
    assert program(1) == 2
    taken = report.choice[0]["taken"]
    assert calls.count(f"keep {taken}") == 1
    assert calls[-2:] == [f"keep {taken}", taken]
    before = len(calls)
    assert program(2) == 3
    assert calls[before:] == [taken]


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"codegen": "ops"}, "codegen='ops'"),
        ({"codegen": "tiered"}, "codegen='tiered'"),
        ({"target": "ascend-a3"}, "target='ascend-a3'"),
        ({"lock": "k31.lock"}, "a contract names fusions"),
    ],
)
def test_what_it_does_not_go_with(others, says):
    with pytest.raises(OptionError, match=says):
        Options(choice="measured", **others)


def test_ahead_of_time_it_is_refused():
    arguments = (*inputs(), KEYS.clone(), torch.tensor([7]))
    with torch.no_grad(), pytest.raises(OptionError, match="ahead of time"):
        captured_call(step, arguments, {}, Options(choice="measured"), lambda *_: pytest.fail("it is not built"))


def test_a_graph_without_fusions_is_not_measured(monkeypatch):
    monkeypatch.setattr(measured, "in_turns", lambda calls, given: pytest.fail("nothing to choose from"))
    torch._dynamo.reset()
    with torch.no_grad(), fresh_cache():
        x = torch.randn(3)
        got = torch.compile(lambda x: x.sin() * 2, backend="k31", options={"choice": "measured", "cache": False})(x)
    torch.testing.assert_close(got, x.sin() * 2)
    assert k31compile.last_report().choice == []
