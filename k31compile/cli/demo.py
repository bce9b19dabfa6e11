"""``k31 demo``: the main job on real text, k31 beside eager and Inductor, measured in one run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k31compile.cli import console, demo_view, entries
from k31compile.cli.demo_process import ColumnProcess
from k31compile.errors import K31Error, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS = ("pico", "tiny", "mini")
ROUNDS, MIN_ROUNDS, ROUNDS_TIME = 15, 3, 30.0


def demo(
    prompt: Annotated[str, typer.Option(help="The text to continue; its bytes are the tokens.")] = entries.PROMPT,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens to generate.")] = 32,
    model: Annotated[
        str | None, typer.Option(help="pico (trained), tiny or mini; default: pico if it is here.")
    ] = None,
    skip: Annotated[str, typer.Option(help="Columns to leave out: eager, inductor, or both with a comma.")] = "",
    limit: Annotated[float, typer.Option(min=1, help="Seconds after which a column that still builds stops.")] = 150,
    built: Annotated[bool, typer.Option("--built", help="Also k31 with Inductor around it; takes minutes.")] = False,
) -> int:
    """Compile a small model, continue a text with it, and compare with eager PyTorch and Inductor."""
    task = {"model": _model(model), "prompt": _prompt(prompt), "tokens": tokens}
    columns = [ColumnProcess(name, task) for name in _columns(skip, built)]
    try:
        _build(columns[0], limit)
        first = columns[0]
        if first.built is None:
            raise K31Error(
                f"the column k31 failed: {first.why}", hint="k31 explain shows what the compiler makes of it"
            )
        if not console.json_wanted():
            demo_view.show_first(first, console.output())
        for column in columns[1:]:
            _build(column, limit)
        rounds = _measure([column for column in columns if column.built is not None])
    finally:
        for column in columns:
            column.stop()
    result = demo_view.result(columns, task, rounds)
    console.emit(result, lambda out: demo_view.show(result, out))
    tied = bool(result["ties"] and result["ties"][0])  # then either token is right, and the text says so
    return 1 if result["same_tokens"] is False and not tied else 0


def _model(name: str | None) -> str:
    if name is None:
        return "pico" if entries.pico_is_here() else "tiny"
    if name not in MODELS:
        raise UsageError(f"there is no demo model {name!r}", hint=f"models: {', '.join(MODELS)}")
    if name == "pico":
        entries.build_model("pico")
    return name


def _prompt(text: str) -> list[int]:
    if not text:
        raise UsageError("the prompt is empty", hint="give at least one character")
    return list(text.encode("utf-8"))


def _columns(skip: str, built: bool) -> list[str]:
    skipped = [name.strip() for name in skip.split(",") if name.strip()]
    for name in skipped:
        if name not in ("eager", "inductor"):
            raise UsageError(f"--skip knows no column {name!r}", hint="columns that can be skipped: eager, inductor")
    extra = ["k31-built"] if built else []
    return [name for name in ("k31", "eager", "inductor", *extra) if name not in skipped]


def _build(column: ColumnProcess, limit: float) -> None:
    with console.waiting(column.name) as tick:
        column.build(limit, tick)
    if column.built is None:
        console.errors().print(f"{column.name}: left out, {column.why}", markup=False)


def _measure(columns: list[ColumnProcess]) -> int:
    """Repeat in turns, so that whatever else the machine does meets every column alike; return the rounds.

    One more round comes first and does not count: processes that waited for long begin cold.
    """
    begin = time.monotonic()
    with console.waiting("measuring") as tick:
        for done in range(ROUNDS + 1):
            for column in columns:
                column.measure(_labelled(tick, f"at most {ROUNDS} rounds, now {done}"), counts=done > 0)
            if done >= MIN_ROUNDS and time.monotonic() - begin > ROUNDS_TIME:
                return done
    return ROUNDS


def _labelled(tick: Callable[[str], None], text: str) -> Callable[[str], None]:
    def labelled(_state: Any) -> None:
        tick(text)

    return labelled
