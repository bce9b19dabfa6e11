"""``k31 passes``: every pass in the order in which it runs, and what it declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from k31compile.cli import console

if TYPE_CHECKING:
    from k31compile.passes.registry import Pass


def passes() -> None:
    """List the passes in the order in which they run."""
    from k31compile.passes.registry import all_passes

    listed = [_described(one) for one in all_passes()]
    console.emit({"passes": listed}, lambda out: _render(listed, out))


def _described(one: Pass) -> dict[str, Any]:
    return {
        "name": one.name,
        "fusion": one.fusion,
        "numerics": one.numerics,
        "needs": list(one.needs),
        "after": list(one.after),
        "targets": list(one.targets),
        "identity": one.identity,
        "summary": one.documentation.partition("\n")[0],
    }


def _render(listed: list[dict[str, Any]], out: Console) -> None:
    for number, one in enumerate(listed, 1):
        order = "".join(f", {key} {', '.join(one[key])}" for key in ("needs", "after") if one[key])
        out.print(f"{number}. {one['name']}", style="bold", markup=False, highlight=False)
        what = f"fusion {one['fusion']}, {one['numerics']}, targets {', '.join(one['targets'])}{order}"
        for line in (what, one["summary"]):
            out.print(f"   {line}", markup=False, highlight=False)
