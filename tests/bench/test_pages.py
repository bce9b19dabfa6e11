"""The page, the tables and the charts: what is in them, and that they need nothing else."""

from html.parser import HTMLParser

import pytest

from k31compile.bench.charts import chart, lines_of
from k31compile.bench.goals import Bound, Goals
from k31compile.bench.markdown import results_page
from k31compile.bench.page import results_html
from k31compile.bench.rows import Row
from k31compile.bench.statistics import ratio_of
from k31compile.bench.table import HEADS, cells, memory_text, summary, time_text

MACHINE = {
    "processor": "CPU <1>", "cores": 2, "capability": "AVX2", "threads": 1, "time": "CPU time of the one thread",
    "malloc": {"MALLOC_TRIM_THRESHOLD_": "2147483647"}, "malloc_keeps_temporaries": True, "load": 0.1,
}  # fmt: skip
VERSIONS = {"torch": "2.13.0", "python": "3.11", "k31compile": "0.1.0"}


def measured(case: str, against: str, factor: float, size: float, noise: float = 0.01) -> Row:
    row = Row("operators", "indexer", case, against, 1, series="indexer decode", size=size)
    ours = [1e6, 1.01e6, 0.99e6, 1e6, 1e6]
    ratio = ratio_of(ours, [factor * one * (1 + noise * place) for place, one in enumerate(ours, -2)])
    row.take(ratio, 1e6 * size, factor * 1e6 * size)
    row.peak_extra_bytes = 3 << 20
    row.tell_roof(0.5)
    row.judge(Goals({"inductor": Bound(3.0, 2.0)}, Bound(0.8, 0.4)))
    return row


@pytest.fixture
def rows() -> list[Row]:
    return [
        measured("S=1024", "inductor", 4.0, 1024),
        measured("S=4096", "inductor", 2.5, 4096),
        measured("S=4096", "eager", 1.01, 4096, noise=0.2),
        Row("operators", "indexer", "S=<k>", "eager", 1, error="k31: result 0 is 1e+00 away"),
        Row("models", "kimi_linear", "decode", "inductor", 1, skipped="transformers is not installed"),
    ]


def test_cells_say_what_was_measured_and_whether_it_is_enough(rows: list[Row]) -> None:
    named = dict(zip(HEADS, cells(rows[0]), strict=True))
    assert (named["faster by"], named["roof"], named["goal"]) == ("4.00 x", "50%", "3 x, 80%")
    assert named["at most"] == "8 x", "twice as fast as ours, at the whole roof"
    assert (named["time"], named["memory"]) == ("1.02 / 4.1 s", "3.0 MiB")
    assert named["met"] == "ratio yes, roof floor only, memory NO"
    assert dict(zip(HEADS, cells(rows[1]), strict=True))["met"] == "ratio floor only, roof floor only, memory NO"


def test_times_are_in_one_unit_and_memory_beside_the_others() -> None:
    assert time_text(1.234e-3, 0.4567) == "1.23 / 457 ms"
    assert time_text(4.5e-5, 1.2e-4) == "45 / 120 us"
    assert memory_text(1 << 20, 3 << 30) == "1.0 / 3072.0 MiB"


def test_no_ratio_is_shown_that_the_noise_hides(rows: list[Row]) -> None:
    assert rows[2].ratio is None
    assert cells(rows[2])[3] == "noisy: 0.81 .. 1.21"


def test_errors_and_what_is_not_measured_are_told(rows: list[Row]) -> None:
    assert cells(rows[3])[3] == "ERROR: k31: result 0 is 1e+00 away"
    assert cells(rows[4])[3] == "not measured: transformers is not installed"
    assert summary(rows).endswith("5 rows, 1 of them wrong, 1 not measured")


def test_the_roof_of_a_case_counts_once_however_many_it_is_compared_with(rows: list[Row]) -> None:
    assert summary(rows[1:2]).startswith("0 goals met, 2 at the floor only, 1 below it")
    assert summary(rows[1:3]).startswith("0 goals met, 2 at the floor only, 2 below it")


def test_the_page_needs_nothing_else_and_is_closed(rows: list[Row]) -> None:
    text = results_html("k31 bench --only '<x>'", rows, MACHINE, VERSIONS)
    for forbidden in ("<script", "http", "src=", "@import", "<1>", "<x>", "<k>"):
        assert forbidden not in text
    for wanted in ("large temporaries kept", "MALLOC_TRIM_THRESHOLD_", "CPU time of the one thread", "<svg", "2.13.0"):
        assert wanted in text
    assert text.count("<h2>") == 2
    open_tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: open_tags.append(tag)  # type: ignore[method-assign]
    parser.handle_endtag = lambda tag: open_tags.remove(tag)  # type: ignore[method-assign]
    parser.feed(text)
    # HTML closes the cells that are written open, meta has no end
    assert set(open_tags) <= {"meta"}


def test_a_chart_has_a_line_for_each_and_a_place_for_each_size(rows: list[Row]) -> None:
    lines = lines_of(rows)
    assert lines == {
        "indexer decode": {
            "k31": [(1024, 1024.0), (4096, 4096.0)],
            "inductor": [(1024, 4096.0), (4096, 10240.0)],
            "eager": [(4096, pytest.approx(4136.96))],
        }
    }
    drawn = chart("indexer decode", lines["indexer decode"])
    assert drawn.count("<polyline") == 3
    assert drawn.count("<circle") == 5
    assert ">1k<" in drawn
    assert ">4k<" in drawn


def test_times_are_of_one_token(rows: list[Row]) -> None:
    rows[0].tokens = rows[1].tokens = 1024
    assert lines_of(rows[:2])["indexer decode"]["k31"] == [(1024, 1.0), (4096, 4.0)]


def test_one_size_is_no_line(rows: list[Row]) -> None:
    assert lines_of(rows[1:]) == {}


def test_the_committed_table_names_its_command_and_every_row(rows: list[Row]) -> None:
    text = results_page("k31 bench --output-md benchmarks/RESULTS.md", rows, MACHINE, VERSIONS)
    assert "Made by `k31 bench --output-md benchmarks/RESULTS.md`" in text
    assert text.count("\n| indexer") == 4
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {len(HEADS) + 1}
