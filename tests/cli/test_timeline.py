"""`k31 explain` with a schedule: drawn on its page, told in its JSON, written for Perfetto; wrong calls in one line."""

import json
import re
from xml.etree import ElementTree

import pytest


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trace", "t.json"], "--trace is a schedule for a target; add --target ascend-a3, ascend-950 or cuda"),
        (["--target", "ascend-b2"], "there is no target 'ascend-b2'; targets: ascend-950, ascend-a3, cuda"),
        (["--trace", "no/t.json", "--target", "cuda"], "there is no folder"),
    ],
)
def test_a_wrong_call_is_told(arguments, told, k31, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, errors = k31("explain", f"{small}:entry", *arguments)
    assert code == 2
    assert told in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_schedule_is_drawn_told_and_traced(k31_json, small, tmp_path):
    html, trace = tmp_path / "page.html", tmp_path / "trace.json"
    code, data = k31_json(
        "explain", f"{small}:entries", "--html", str(html), "--trace", str(trace), "--target", "ascend-a3"
    )
    assert code == 0
    told = data["entries"]["small"]["schedule"]
    assert 0 < told["critical_path"] <= told["predicted"] <= told["serial"]
    (note,) = (note for note in data["entries"]["small"]["notes"] if note.startswith("schedule: "))
    assert f"{told['predicted'] * 1e6:.1f} us in {told['streams']} streams with {told['events']} events" in note
    assert f"{told['serial'] * 1e6:.1f} us on one" in note
    assert note.endswith("nothing was measured")
    text = html.read_text()
    assert "All times are predictions of a cost model" in text
    before, after = (ElementTree.fromstring(svg) for svg in re.findall(r'<svg[^>]*predicted">.*?</svg>', text))
    tasks = [[group.get("data-task") for group in svg.findall("g")] for svg in (before, after)]
    assert sorted(tasks[0]) == sorted(tasks[1])
    assert {"lightning_indexer", "sparse_flash_attention"} <= set(tasks[0])
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sorted(span["name"] for span in spans if span["pid"] == 2) == sorted(tasks[1])
    last = max(span["ts"] + span["dur"] for span in spans if span["pid"] == 2)
    assert last == pytest.approx(told["predicted"] * 1e6)
