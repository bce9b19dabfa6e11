"""passes, explain and what all commands share, from outside."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from k31compile.passes.registry import all_passes

Run = Callable[..., tuple[int, str, str]]
RunJson = Callable[..., tuple[int, dict[str, Any]]]


def test_passes_are_listed_in_their_order(k31: Run, k31_json: RunJson) -> None:
    code, out, _ = k31("passes")
    assert code == 0
    names = [one.name for one in all_passes()]
    assert all(name in out for name in names)
    code, data = k31_json("passes")
    assert (code, [one["name"] for one in data["passes"]]) == (0, names)
    assert all(one["summary"] and one["targets"] and one["numerics"] for one in data["passes"])


def test_explain_says_what_is_fused(small: str, k31_json: RunJson) -> None:
    code, data = k31_json("explain", f"{small}:entries")
    assert code == 0
    assert data["fused"]["lightning_indexer"] == 1
    assert data["graphs"] == 1
    assert list(data["entries"]) == ["small"]
    assert data["nodes_before"] > data["nodes_after"] > 0
    (region,) = data["regions"]
    assert (region["name"], region["calls"]) == ("indexer_prolog", 1)
    assert "small_model.py:" in region["where"]
    assert {part["name"]: part["weight_bytes"] for part in region["parts"]} == {
        # weights and biases of three projections in float32
        "wq_b": 4 * (24 * 8 * 16 + 8 * 16),
        "wk": 4 * (24 * 16 + 16),
        "weights_proj": 4 * (24 * 8 + 8),
    }
    assert region["edges"] == []
    assert all(part["nodes"] and part["inputs"] for part in region["parts"])


def test_explain_writes_a_page_that_needs_nothing_else(small: str, tmp_path: Path, k31: Run) -> None:
    page = tmp_path / "report.html"
    code, out, err = k31("explain", f"{small}:entry", "--html", str(page))
    assert code == 0
    assert "lightning_indexer" in out
    assert "explain: 1/1 small" in err
    text = page.read_text()
    for forbidden in ("<script", "http", "src=", "@import"):
        assert forbidden not in text
    assert "fuse_lightning_indexer" in text
    assert "<svg" in text
    assert "indexer_prolog in" in out
    assert 'aria-label="indexer_prolog: 3 parts, 0 edges"' in text
    opened: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: opened.append(tag)  # type: ignore[method-assign]
    parser.handle_endtag = lambda tag: opened.remove(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert opened == ["meta"]


def test_a_page_needs_a_folder(small: str, k31: Run) -> None:
    code, _, err = k31("explain", f"{small}:entry", "--html", "/nowhere/at/all.html")
    assert code == 2
    assert "there is no folder /nowhere/at" in err


def test_a_process_of_its_own(small: str, process: Callable[..., Any]) -> None:
    done = process("explain", f"{small}:entry", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["fused"]["lightning_indexer"] == 1
    assert "\x1b" not in done.stdout + done.stderr
    done = process("explain", "tyni", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "K31-0103"
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" in process("explain", "tyni", "--debug").stderr
