"""k31 bench from outside: the list, wrong words, one real row, files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]
RunJson = Callable[..., tuple[int, dict[str, Any]]]


def test_cases_are_listed_by_suite(k31_json: RunJson) -> None:
    code, data = k31_json("bench", "--list", "--suite", "operators,models")
    assert code == 0
    assert list(data["cases"]) == ["models", "operators"]
    assert "kda_recurrent decode fp32 B=8 H=96, states from DRAM" in data["cases"]["operators"]
    assert "mini decode bf16 B=8 S=65536" in data["cases"]["models"]
    _, quick = k31_json("bench", "--list", "--quick")
    assert 0 < len(quick["cases"]["operators"]) < len(data["cases"]["operators"])
    _, some = k31_json("bench", "--list", "--only", "decode*S=65536")
    assert all("S=65536" in name for name in some["cases"]["operators"])


def test_the_cases_of_a_target_are_its_entries(small: str, k31: Run) -> None:
    code, out, _ = k31("bench", f"{small}:entry", "--list")
    assert (code, out.splitlines()) == (0, [f"models: {small}:entry small"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--suite", "speed"], "K31-0103: there is no suite 'speed'; suites: operators, models, compile"),
        (["--against", "eagre"], "K31-0103: there is no opponent 'eagre'; opponents: inductor, max-autotune, eager"),
        (["--only", "nothing like it"], "K31-0103: no case has 'nothing like it' in its name; k31 bench --list"),
        (["--html", "no/such/folder/f.html"], "K31-0103: there is no folder "),
        (["tiny", "--suite", "operators"], "K31-0103: the suite of operators has cases of its own"),
        (["--threads", "0"], "K31-0103: Invalid value for '--threads'"),
    ],
)
def test_wrong_use_is_one_line_and_2(argv: list[str], says: str, k31: Run) -> None:
    code, out, err = k31("bench", *argv)
    assert (code, out) == (2, "")
    assert err.startswith(says)
    assert len(err.splitlines()) == 1


def test_one_row_is_measured_and_written(tmp_path: Path, k31_json: RunJson) -> None:
    page, table, file = tmp_path / "f.html", tmp_path / "f.md", tmp_path / "f.json"
    only = "indexer decode fp32 T=1 S=4096"
    options = ["--against", "eager", "--seconds", "0.2"]
    files = ["--html", str(page), "--output-md", str(table), "--output-json", str(file)]
    code, data = k31_json("bench", "--only", only, *options, *files)
    assert code == 0, data
    (row,) = data["rows"]
    assert (row["suite"], row["name"], row["against"], row["threads"]) == ("operators", "lightning_indexer", "eager", 1)
    assert row["low"] <= row["high"]
    assert row["noisy"] == (row["ratio"] is None)
    assert row["must"] == 1.4
    assert set(data["machine"]["malloc"]) == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"}
    assert json.loads(file.read_text()) == data
    made_by = "k31 bench --against eager --only &#x27;indexer decode fp32 T=1 S=4096&#x27; --seconds 0.2"
    assert f"<code>{made_by}</code>" in page.read_text()
    assert "<h2>operators</h2>" in page.read_text()
    assert "| lightning_indexer | decode fp32 T=1 S=4096 K=2048 | eager |" in table.read_text()


@pytest.mark.slow
def test_a_target_is_measured_in_processes_of_its_own(small: str, k31_json: RunJson) -> None:
    code, data = k31_json("bench", f"{small}:entry", "--against", "eager", "--seconds", "0.2")
    assert code == 0, data
    (row,) = data["rows"]
    assert (row["suite"], row["case"], row["error"]) == ("models", "small", "")
    assert row["details"]["fused"]["lightning_indexer"] == 1
    assert row["rounds"] >= 5
