"""The demo: its options, its columns, and what it says when columns differ or stop."""

import io
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from k31compile.cli import demo_view
from k31compile.cli.demo_process import ColumnProcess
from k31compile.cli.demo_ties import TieCounter

Run = Callable[..., tuple[int, str, str]]
TASK = {"model": "tiny", "prompt": [100, 101, 102], "tokens": 3}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--skip", "k31"], "K31-0103: --skip knows no column 'k31'"),
        (["--model", "huge"], "K31-0103: there is no demo model 'huge'"),
        (["--prompt", ""], "K31-0103: the prompt is empty"),
        (["--tokens", "1"], "K31-0103: Invalid value for '--tokens'"),
    ],
)
def test_wrong_use_is_one_line_and_2(argv: list[str], says: str, k31: Run) -> None:
    code, out, err = k31("demo", *argv)
    assert (code, out) == (2, "")
    assert err.startswith(says)
    assert len(err.splitlines()) == 1


def built(tokens: list[int], **more: Any) -> dict[str, Any]:
    report = {"fused": {"static_top_k": 1}, "providers": {}, "nodes_before": 9, "nodes_after": 5}
    report |= {"refused": [], "notes": []}
    given = {
        "margins": [0.5, 0.25],
        "ties": None,
        "model": "m",
        "threads": 2,
        "graphs": 2,
        "cached": False,
        "report": report,
    }
    return {"tokens": tokens, "seconds": 1.5, "first_token": 1.0, **given, **more}


def column(name: str, tokens: list[int] | None, seconds: float = 1.0, **more: Any) -> ColumnProcess:
    made = ColumnProcess(name, TASK)
    if tokens is None:
        made.why = "stopped after 3 s"
    else:
        made.built = built(tokens, **more)
        made.prefill, made.decode = [seconds, seconds * 2, seconds * 3], [seconds / 10] * 3
    return made


def shown(data: dict[str, Any]) -> str:
    out = io.StringIO()
    demo_view.show(data, Console(file=out, width=160))
    return out.getvalue()


def test_columns_stand_side_by_side_with_their_ratios() -> None:
    columns = [column("k31", [1, 2, 3], 0.5), column("eager", [1, 2, 3], 1.0, ties=[2, 40]), column("inductor", None)]
    data = demo_view.result(columns, TASK, 3)
    assert data["same_tokens"] is True
    assert data["ratios"] == {"eager": {"prefill": 2.0, "decode": 2.0}}
    assert data["columns"]["k31"]["prefill"] == {"median": 3.0, "low": 2.0, "high": 6.0}
    assert json.loads(json.dumps(data)) == data
    text = shown(data)
    assert "gave the same 3 greedy tokens, compared exactly; 2 of 40 selections had equal scores" in text
    assert "stopped after 3 s" in text


def test_a_difference_is_said_and_where() -> None:
    data = demo_view.result([column("k31", [1, 2, 3]), column("eager", [1, 2, 4])], TASK, 3)
    assert data["same_tokens"] is False
    text = shown(data)
    assert "NOT the same: k31 and eager part at token 3, where eager's two best logits are 0.25 apart" in text


def test_one_column_alone_claims_nothing() -> None:
    data = demo_view.result([column("k31", [1, 2, 3])], TASK, 3)
    assert data["same_tokens"] is None
    assert "nothing to compare them with" in shown(data)


def test_ties_at_the_edge_are_counted() -> None:
    scores = torch.tensor([[3.0, 2.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, -torch.inf, -torch.inf]])
    with TieCounter(2) as ties:
        scores.topk(2)
        scores.topk(3)
    assert (ties.tied, ties.rows) == (1, 2)


def test_a_column_is_stopped_at_its_limit_with_all_that_it_started() -> None:
    said: list[str] = []
    slow = ColumnProcess("eager", {**TASK, "prompt": [1] * 400, "tokens": 5000})
    begin = time.monotonic()
    slow.build(3, said.append)
    assert time.monotonic() - begin < 20
    assert slow.built is None
    assert slow.why.startswith("stopped after 3 s, while ")
    assert said
    assert slow._process.poll() is not None
    slow.stop()


def test_a_column_that_fails_says_why() -> None:
    broken = ColumnProcess("eager", {**TASK, "prompt": []})
    broken.build(60, lambda text: None)
    assert broken.built is None
    assert "Error" in broken.why
    broken.stop()


@pytest.mark.slow
def test_the_demo_from_outside(process: Callable[..., Any]) -> None:
    done = process("demo", "--tokens", "4", "--skip", "eager,inductor", "--prompt", "x = 1\n" * 10, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["columns"]["k31"]["graphs"] == 2
    assert len(data["columns"]["k31"]["tokens"]) == 4
    assert data["columns"]["k31"]["repeats"] is True
    assert data["report"]["fused"]["lightning_indexer"] == 4
    assert "k31: building the prefill graph" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
