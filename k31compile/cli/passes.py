"""``k31 passes``: every pass in the order in which it runs, and what it declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

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
    table = Table("", "pass", "fusion", "numerics", "needs", "after", "targets")
    for number, one in enumerate(listed, 1):
        names = (", ".join(one[key]) for key in ("needs", "after", "targets"))
        table.add_row(str(number), one["name"], one["fusion"], one["numerics"], *names)
    out.print(table)
    for one in listed:
        out.print(f"{one['name']}: {one['summary']}", markup=False, highlight=False)
