"""``k31 weights``: what files of weights hold, and their conversion into the layout that a target reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from k31compile.cli import console, target
from k31compile.errors import UsageError

if TYPE_CHECKING:
    from k31compile.weights.plan import Plan
    from k31compile.weights.rules import Choose

weights = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Convert and inspect files of weights.")

_Globs = Annotated[list[str] | None, typer.Option(metavar="GLOB")]


@weights.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A .safetensors file, or a folder with shards.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A folder, new or empty.")],
    layout: Annotated[str, typer.Option(help="nz: blocks for Ascend; nd: back to plain tensors.")] = "nz",
    for_target: Annotated[str, typer.Option("--for", metavar="TARGET", help="Decide by this model's graph.")] = "",
    product: Annotated[str, typer.Option("--product", help="With --for: ascend-a3 (the default) or ascend-950.")] = "",
    include: _Globs = None,
    exclude: _Globs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the decisions and write nothing.")] = False,
) -> None:
    """Write a checkpoint again with its weights in blocks, or back; repeat the call if it was interrupted."""
    from k31compile.weights.convert import plan_of, write

    _check_call(destination, layout, for_target, product, bool(include or exclude))
    plan = plan_of(source, layout, _rule(source, for_target, product or "ascend-a3", include or [], exclude or []))
    if not dry_run:
        with console.progress("convert", len(plan.source.shards)) as advance:
            write(plan, destination, advance)
    steps = [step.to_dict() for step in plan.steps]
    data = {"layout": layout, "written": None if dry_run else str(destination), "tensors": steps}
    console.emit(data, lambda out: _render(plan, destination, dry_run, out))


@weights.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .safetensors file, or a folder with shards.")],
) -> None:
    """List the tensors of a checkpoint and the layout that each is recorded to have; no tensor is read."""
    from k31compile.weights.checkpoint import open_checkpoint

    rows: list[dict[str, Any]] = []
    checkpoint = open_checkpoint(path)
    for shard, tensor in checkpoint.tensors():
        record = shard.layout_of(tensor)
        rows.append(
            {
                "name": tensor.name,
                "layout": record.layout,
                "dtype": record.dtype,
                "shape": list(record.shape),
                "stored_shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "file": shard.name,
            }
        )
    files = {
        shard.name: {
            "tool": shard.record.tool if shard.record else None,
            "source_sha256": shard.record.source_sha256 if shard.record else None,
        }
        for shard in checkpoint.shards
    }
    console.emit({"files": files, "tensors": rows}, lambda out: _render_rows(rows, files, out))


def _check_call(destination: Path, layout: str, for_target: str, product: str, has_patterns: bool) -> None:
    from k31compile.weights.plan import LAYOUTS

    if layout not in LAYOUTS:
        raise UsageError(f"there is no layout {layout!r}", hint=f"layouts: {', '.join(LAYOUTS)}")
    if layout == "nd" and (has_patterns or for_target):
        raise UsageError("--include, --exclude and --for choose what becomes blocks", hint="leave them out with nd")
    if product and not for_target:
        raise UsageError(
            f"--product {product} says for which product a model's graph decides, and no model is named",
            hint="add --for TARGET, or leave --product out",
        )
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination} is a file", hint="give a folder that is empty or new")


def _rule(source: Path, for_target: str, product: str, include: list[str], exclude: list[str]) -> Choose:
    from k31compile.weights.checkpoint import open_checkpoint
    from k31compile.weights.rules import by_name, with_patterns

    names = [tensor.name for _, tensor in open_checkpoint(source).tensors()]
    choose: Choose = by_name
    if for_target:
        from k31compile.weights.by_graph import rule_of

        dtype = "bf16" if target.is_shipped(for_target) else None
        choose = rule_of(target.load_entries(for_target, dtype), product, names)
    return with_patterns(choose, include, exclude, names)


def _render(plan: Plan, destination: Path, dry_run: bool, out: Console) -> None:
    table = console.table("tensor", "dtype", "shape", "layout", "why not blocks")
    for step in plan.steps:
        shape = "x".join(map(str, step.before.shape))
        why = f"{step.reason}; {step.remedy}" if step.remedy else step.reason
        table.add_row(_cell(step.tensor.name), step.before.dtype, shape, step.layout, _cell(why))
    if dry_run:
        out.print(table)
    done = "would be converted; nothing was written" if dry_run else f"converted to {plan.layout}: {destination}"
    out.print(f"{plan.changed()} of {len(plan.steps)} tensors {done}", markup=False, highlight=False)
    kept = Counter(step.reason for step in plan.steps if not step.is_changed and not dry_run)
    for reason, count in kept.most_common(5):
        out.print(f"  {count} left as they are, as this one: {reason}", markup=False, highlight=False)


def _render_rows(rows: list[dict[str, Any]], files: dict[str, dict[str, Any]], out: Console) -> None:
    table = console.table("tensor", "layout", "dtype", "shape", "bytes", "file")
    for row in rows:
        shape = "x".join(map(str, row["shape"]))
        table.add_row(_cell(row["name"]), row["layout"], row["dtype"], shape, str(row["bytes"]), _cell(row["file"]))
    out.print(table)
    blocks = sum(row["layout"] == "nz" for row in rows)
    total = sum(row["bytes"] for row in rows)
    out.print(f"{len(rows)} tensors, {blocks} in blocks, {total} bytes in {len(files)} files", highlight=False)


def _cell(text: str) -> str:
    return escape(console.printable(text))
