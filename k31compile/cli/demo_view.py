"""What the demo prints and its JSON: fusions, tokens, and speeds side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from k31compile.cli import console
from k31compile.cli.demo_process import ColumnProcess

_SAID = {
    "k31": "torch.compile(model, backend='k31', options={'codegen': 'ops'})",
    "eager": "the model as written",
    "inductor": "torch.compile(model, backend='inductor')",
    "k31-built": "torch.compile(model, backend='k31')",
}


def show_first(column: ColumnProcess, out: Console) -> None:
    """Print k31's own result as soon as it is there."""
    built = column.built
    assert built is not None
    out.print(f"model: {built['model']}", markup=False, highlight=False)
    out.print(f"prompt: {len(column.task['prompt'])} bytes, each a token", highlight=False)
    out.print(f"k31 wrote: {_text(built['tokens'])}", markup=False, highlight=False)
    out.print(
        f"first token after {built['first_token']:.1f} s, all after {built['seconds']:.1f} s, compiling included; "
        f"{built['graphs']} graphs",
        highlight=False,
    )
    report = built["report"]
    table = console.table("fused", "call sites", "served by")
    for name, count in report["fused"].items():
        provider = report["providers"].get(name, {})
        served = provider["why"] if provider else "part of lightning_indexer"
        table.add_row(name, str(count), served)
    out.print(table)
    out.print(f"graph nodes: {report['nodes_before']} before, {report['nodes_after']} after", highlight=False)
    for refusal in sorted(report["refused"], key=lambda refusal: not refusal["near_miss"]):
        what = "near miss" if refusal["near_miss"] else "refused"
        out.print(f"{what}: {refusal['name']}: {refusal['reason']} ({refusal['where']})", markup=False, highlight=False)
    for note in report["notes"]:
        out.print(f"note: {note}", markup=False, highlight=False)


def result(columns: Sequence[ColumnProcess], task: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return everything that was found, as JSON values."""
    there = [column for column in columns if column.built is not None]
    first = there[0].built
    assert first is not None
    data = {column.name: _column(column, len(task["prompt"])) for column in columns}
    return {
        "model": first["model"],
        "prompt_tokens": len(task["prompt"]),
        "new_tokens": task["tokens"],
        "rounds": rounds,
        "threads": first["threads"],
        "columns": data,
        "ratios": _ratios(data),
        "report": first["report"],
        "same_tokens": _same(there) if len(there) > 1 else None,
        "difference": _difference(there),
        "ties": next((c.built["ties"] for c in there if c.built is not None and c.built["ties"]), None),
    }


def show(data: dict[str, Any], out: Console) -> None:
    """Print the columns side by side."""
    table = console.table("column", "first run", "prefill tokens/s", "decode tokens/s", "graphs", "what it is")
    for name, column in data["columns"].items():
        if column["left_out"]:
            table.add_row(name, "left out", "", "", "", column["left_out"])
            continue
        speeds = (_speed(column[part]) for part in ("prefill", "decode"))
        first = f"{column['first_run_s']:.1f} s" + (" (cached)" if column["from_cache"] else "")
        table.add_row(name, first, *speeds, str(column["graphs"]), _SAID[name])
    out.print(table)
    out.print(
        f"median of {data['rounds']} rounds in turns, lowest to highest in brackets; "
        f"{data['prompt_tokens']} prompt tokens in chunks, {data['new_tokens']} new ones; {data['threads']} threads",
        highlight=False,
    )
    for name, ratio in data["ratios"].items():
        factors = f"prefill {ratio['prefill']:.2f} x, decode {ratio['decode']:.2f} x"
        out.print(f"k31 / {name}: {factors} (above 1: k31 is faster)", highlight=False)
    out.print(_verdict(data), highlight=False)


def _verdict(data: dict[str, Any]) -> str:
    ties = ""
    if data["ties"]:
        tied, rows = data["ties"]
        ties = f"; {tied} of {rows} selections had equal scores at their edge"
    if data["same_tokens"] is None:
        return "tokens: nothing to compare them with, the other columns are not there"
    names = [name for name, column in data["columns"].items() if not column["left_out"]]
    if data["same_tokens"]:
        return f"tokens: {', '.join(names)} gave the same {data['new_tokens']} greedy tokens, compared exactly{ties}"
    return f"tokens: NOT the same: {data['difference']}{ties}"


def _column(column: ColumnProcess, prompt: int) -> dict[str, Any]:
    if column.built is None:
        return {"left_out": column.why}
    return {
        "left_out": "",
        "first_run_s": column.built["seconds"],
        "from_cache": column.built["cached"],
        "first_token_s": column.built["first_token"],
        "prefill": _spread([prompt / seconds for seconds in column.prefill]),
        "decode": _spread([1 / seconds for seconds in column.decode]),
        "graphs": column.built["graphs"],
        "tokens": column.built["tokens"],
        "repeats": column.repeats,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _speed(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f} ({spread['low']:.1f} .. {spread['high']:.1f})"


def _ratios(data: dict[str, Any]) -> dict[str, dict[str, float]]:
    ours = data["k31"]
    return {
        name: {part: ours[part]["median"] / column[part]["median"] for part in ("prefill", "decode")}
        for name, column in data.items()
        if name != "k31" and not column["left_out"]
    }


def _same(columns: Sequence[ColumnProcess]) -> bool:
    return len({tuple(column.built["tokens"]) for column in columns if column.built is not None}) == 1


def _difference(columns: Sequence[ColumnProcess]) -> str:
    """Where two columns part, and how close the choice was there."""
    first, *rest = (column for column in columns if column.built is not None)
    assert first.built is not None
    for other in rest:
        assert other.built is not None
        pairs = enumerate(zip(first.built["tokens"], other.built["tokens"], strict=True))
        at = next((place for place, (left, right) in pairs if left != right), None)
        if at is not None:
            margins = other.built["margins"]
            close = f", where {other.name}'s two best logits are {margins[at - 1]:.2g} apart" if at else ""
            return f"{first.name} and {other.name} part at token {at + 1}{close}"
    return ""


def _text(tokens: list[int]) -> str:
    if max(tokens) < 256:
        return repr(bytes(tokens))[1:]
    return " ".join(map(str, tokens))
