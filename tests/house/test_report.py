"""Reports: the keys others rely on, loud when nothing was fused, near misses first."""

import io
import json
import threading

import pytest
from rich.console import Console

from k31compile import report as report_module
from k31compile.errors import K31Error
from k31compile.report import PassRun, Refusal, Report, clear_reports, last_report, record, reports

KEYS = {
    *("fused", "contains", "refused", "graphs", "graph_breaks", "nodes_before", "nodes_after", "passes"),
    *("schedule", "cache", "phases", "versions", "notes", "providers", "confirmations"),
    *("layers", "lines", "regions", "inputs", "memory", "tier"),
    *("leaves", "learned", "weights", "choice"),
}


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "_reports", [])


def full() -> Report:
    return Report(
        fused={"lightning_indexer": 2},
        contains={"short_conv": 1},
        refused=[
            Refusal("static_top_k", "its order is read", "m.py:9", "sort it first"),
            Refusal("lightning_indexer", "there is no [relu]", "m.py:7", "add it", near_miss=True),
        ],
        graph_breaks=1,
        nodes_before=30,
        nodes_after=11,
        passes=[PassRun("fuse_lightning_indexer", 0.5, 2, "reassociated")],
        phases={"trace": 0.25, "passes": 0.5},
        versions={"torch": "2.13.0"},
        notes=["no C++ compiler: the reference serves"],
        regions=[
            {
                "name": "mla_prolog",
                "where": "layers.1 (m.py:3)",
                "calls": 2,
                "parts": [{"name": name} for name in ("up", "norm", "rope", "alone")],
                "edges": [["up", "norm"], ["up", "rope"]],
            }
        ],
        providers={"lightning_indexer": {"provider": "cpu", "why": "bf16, contiguous"}},
        confirmations=[
            {"name": "lightning_indexer", "samples": 8, "sizes": [3, 5], "tolerance": 1e-9, "worst_error": 1e-13}
        ],
    )


def test_the_json_has_exactly_the_keys_of_the_interface() -> None:
    data = json.loads(full().to_json())
    assert set(data) == KEYS == set(Report().to_dict())
    assert set(data["refused"][0]) == {"name", "reason", "where", "hint", "near_miss", "layers"}
    assert set(data["passes"][0]) == {"name", "seconds", "changed", "numerics"}
    assert set(data["schedule"]) == {"streams", "events", "critical_path", "serial", "predicted", "super_kernels"}
    assert set(data["cache"]) == {"hit", "level", "key", "why"}


def test_the_text_shows_everything_and_near_misses_first() -> None:
    text = str(full())
    for part in (
        "2 x lightning_indexer",
        "short_conv",
        "bf16, contiguous",
        "[relu]",
        "reference serves",
        "30 nodes before",
        "mla_prolog 2 times, first in layers.1 (m.py:3): alone; up -> norm; up -> rope",
    ):
        assert part in text
    assert text.index("near miss lightning_indexer: there is no [relu] (m.py:7); add it") < text.index(
        "refused static_top_k"
    )
    assert "confirmed on 8 samples in float64 (sizes [3, 5], tolerance 1e-09, worst error 1e-13)" in text
    assert "proved" not in text
    assert "\x1b" not in text


def test_nothing_fused_is_said_loudly() -> None:
    refused = full().refused
    first = str(Report(refused=refused)).splitlines()[0]
    assert first.startswith(
        "nothing was fused in this graph; nearest miss: lightning_indexer: there is no [relu] (m.py:7)"
    )
    assert "first refusal: static_top_k" in Report(refused=refused[:1]).headline()
    assert "nothing in it resembled" in Report().headline()
    assert "these 2 graphs" in Report.merge([Report(), Report()]).headline()
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    Report().render(console)
    assert "\x1b[1;37;41m" in console.file.getvalue()  # type: ignore[attr-defined]


def test_merging_adds_counts_and_keeps_sentences_once() -> None:
    hit = full()
    hit.cache = {"hit": True, "level": "graph", "key": "k", "why": "equal"}
    total = Report.merge([full(), hit])
    assert total.fused == {"lightning_indexer": 4}
    assert (total.graphs, total.graph_breaks, total.nodes_before, total.nodes_after) == (2, 2, 60, 22)
    assert total.passes == [PassRun("fuse_lightning_indexer", 1.0, 4, "reassociated")]
    assert total.phases == {"trace": 0.5, "passes": 1.0}
    assert total.refused == full().refused
    assert total.notes == full().notes
    assert len(total.confirmations) == 1
    assert total.regions == 2 * full().regions
    assert total.cache["hit"] is False
    assert total.cache["why"] == "1 of 2 graphs were found"
    assert Report.merge([full()]).to_dict() == full().to_dict()
    assert Report.merge([]).graphs == 0


def test_layers_of_several_graphs_add_up_and_the_hungriest_is_kept() -> None:
    parts = [
        Report(layers={"a.0": {"short_conv": 1}}, memory={"weights": 5, "inputs": 1, "peak": 7, "at": "m.py:1"}),
        Report(layers={"a.0": {"short_conv": 2}, "a.1": {"kda_chunk": 1}}, tier="ops"),
        Report(memory={"weights": 6, "inputs": 2, "peak": 9, "at": "m.py:2"}, tier="inductor"),
    ]
    merged = Report.merge(parts)
    assert merged.layers == {"a.0": {"short_conv": 3}, "a.1": {"kda_chunk": 1}}
    assert parts[0].layers == {"a.0": {"short_conv": 1}}
    assert merged.memory == parts[2].memory
    assert merged.tier == "ops and inductor"


def test_schedules_of_one_call_add_up() -> None:
    parts = [Report(), Report(), Report()]
    parts[0].schedule |= {"streams": 3, "events": 2, "critical_path": 1.5, "predicted": True}
    parts[1].schedule |= {"streams": 2, "events": 1, "critical_path": 0.5, "serial": 4.0, "super_kernels": 1}
    merged = Report.merge(parts).schedule
    assert merged == {
        "streams": 3,
        "events": 3,
        "critical_path": 2.0,
        "serial": 4.0,
        "predicted": True,
        "super_kernels": 1,
    }


def test_the_newest_report_is_the_last_one() -> None:
    with pytest.raises(K31Error, match="no graph was compiled by k31 in this process yet"):
        last_report()
    one, two = Report(), Report(graphs=7)
    record(one)
    record(two)
    assert last_report() is two
    assert reports() == [one, two]
    clear_reports()
    assert reports() == []


def test_recording_from_many_threads_loses_nothing() -> None:
    threads = [threading.Thread(target=lambda: [record(Report()) for _ in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports()) == 1600
