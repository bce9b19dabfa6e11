"""One case in this process: what is wrong gets no time, what is right a row that other programs can read."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from k31compile.bench.case import Case, Form, Roof, Work
from k31compile.bench.compare import tensors_differ
from k31compile.bench.goals import Bound, Goals
from k31compile.bench.measure import ONE_THREAD, Settings, measure_case
from k31compile.bench.operators import operator_cases
from k31compile.bench.rows import document

EAGER = Settings(("eager",), seconds=0.0)
INTERFACE = {
    "suite": str, "name": str, "case": str, "against": str, "ratio": float, "spread": float, "roof": float,
    "peak_extra_bytes": int, "threads": int,
}  # fmt: skip
"""The fields that others rely on, each of this type or null."""


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(ours: Callable[[torch.Tensor], Any], *forms: Form, **work: Any) -> Case:
    """A case that sums rows, by functions of the test."""

    def make() -> Work:
        x = torch.ones(64, 64)
        expected = x.sum(1)
        bound = [replace(form, bind=lambda function: lambda: function(x)) for form in forms]
        return Work(lambda: ours(x), bound, lambda got, most: tensors_differ(got, expected, most), 1e-6, 1e-6, **work)

    return Case("sum", "64 x 64", make, Goals({"eager": Bound(100.0, 0.001)}), "sum", 64)


def form(name: str, function: Callable[..., Any], **how: Any) -> Form:
    return Form(name, function, lambda function: function, **how)


def right(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


def slow(x: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        result = x.sum(1)
    return result


def wrong(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1) * 1.001


def failing(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("cannot\nbe compiled")


def test_a_wrong_result_of_ours_is_an_error_and_never_timed() -> None:
    (row,) = measure_case("operators", made(wrong, form("", right)), EAGER)
    assert row.error == "k31: result 0 is 1.0e-03 away from the reference, more than 1e-06"
    assert (row.ratio, row.low, row.seconds, row.verdict) == (None, None, None, None)


def test_a_wrong_opponent_is_an_error_and_never_timed() -> None:
    (row,) = measure_case("operators", made(right, form("", wrong)), EAGER)
    assert row.error == "eager: result 0 is 1.0e-03 away from the reference, more than 1e-06"
    assert (row.ratio, row.seconds) == (None, None)


def test_of_two_forms_the_faster_right_one_counts() -> None:
    (row,) = measure_case("operators", made(right, form("slow", slow), form("fast", right), form("off", wrong)), EAGER)
    assert row.form == "fast"
    assert row.error.startswith("off: result 0")
    assert row.other_seconds is not None


def test_an_opponent_that_fails_is_left_out_and_ours_is_not() -> None:
    (row,) = measure_case("operators", made(right, form("", failing)), EAGER)
    assert (row.error, row.skipped) == ("", "eager: ValueError: cannot")
    (row,) = measure_case("operators", made(failing, form("", right)), EAGER)
    assert row.error == "k31: ValueError: cannot"


def test_an_opponent_without_a_form_is_said_to_have_none() -> None:
    (row,) = measure_case("operators", made(right, form("", right, opponents=("inductor",))), EAGER)
    assert row.skipped == "none of the forms is for it"


def test_a_clear_difference_is_a_ratio_with_all_that_belongs_to_it() -> None:
    case = made(right, form("", slow), roof=Roof("float32", 64.0 * 64))
    (row,) = measure_case("operators", case, replace(EAGER, seconds=0.2))
    assert row.ratio is not None
    assert row.ratio > 4  # twenty times the work: a slow machine is slow for both
    assert row.low <= row.ratio <= row.high
    assert row.other_seconds > row.seconds > 0
    assert (row.goal, row.must, row.verdict) == (100.0, 0.001, "floor")
    assert 0 < row.roof < 1
    assert row.details["at_most"] == pytest.approx(row.other_seconds / row.seconds / row.roof, rel=1e-2)
    assert row.rounds >= 5
    data = json.loads(json.dumps(document([row], {"threads": 1}, {"torch": torch.__version__})))
    assert set(data) == {"rows", "machine", "versions"}
    (written,) = data["rows"]
    for name, kind in INTERFACE.items():
        assert written[name] is None or isinstance(written[name], kind), name


def test_several_threads_are_compared_with_one() -> None:
    torch.set_num_threads(2)
    rows = measure_case("operators", made(right, form("", right)), replace(EAGER, threads=2))
    assert [row.against for row in rows] == ["eager", ONE_THREAD]
    assert all(row.threads == 2 and not row.error for row in rows)


@pytest.mark.parametrize(("had", "is_refused"), [(0.8, True), (0.9, False)])
def test_wall_time_means_nothing_while_others_work(monkeypatch, had: float, is_refused: bool) -> None:
    monkeypatch.setattr("k31compile.bench.measure.cores_had", lambda threads: had)
    case = made(right, form("", slow))
    (row, _) = measure_case("operators", case, replace(EAGER, threads=2, seconds=0.2))
    assert (row.ratio is None, row.noisy) == (is_refused, is_refused)
    assert (row.verdict == "noisy") is is_refused
    assert row.details.get("refused", "").startswith("others were at work: 80%") is is_refused


def test_threads_are_set_again(monkeypatch) -> None:
    torch.set_num_threads(2)
    measure_case("operators", made(right, form("", right)), replace(EAGER, threads=2))
    assert torch.get_num_threads() == 2


def test_memory_beyond_inputs_and_results_is_seen() -> None:
    def hungry(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) + torch.ones(16 << 20)[:64] * 0

    (row,) = measure_case("operators", made(hungry, form("", right)), EAGER)
    if row.peak_extra_bytes is None:
        pytest.skip("this kernel does not tell resident peaks")
    assert 60 << 20 <= row.peak_extra_bytes < 80 << 20
    assert row.other_peak_extra_bytes < 8 << 20
    assert row.memory_verdict == "below"


def test_every_case_of_the_suite_has_a_name_of_its_own_and_a_chart_where_it_has_a_size() -> None:
    names = [case.full_name for case in operator_cases()]
    assert len(set(names)) == len(names)
    assert all(bool(case.series) == bool(case.size) for case in operator_cases())
    assert any(case.is_quick for case in operator_cases())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_real_row_is_right_and_far_from_being_slow(dtype: str) -> None:
    """A ratio against eager that is 1.4 to 3 on every machine seen: below a half something is broken, not slow."""
    name = f"lightning_indexer decode {dtype} T=1 S=4096 K=2048"
    (case,) = (case for case in operator_cases() if case.full_name == name)
    (row,) = measure_case("operators", case, replace(EAGER, seconds=0.5))
    assert row.error == ""
    assert row.high > 0.5, asdict(row)
