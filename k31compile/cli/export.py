"""``k31 export``: the fused graph of a model in a format that other tools read; today ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from k31compile.cli import console, target
from k31compile.cli.calling import calling
from k31compile.errors import UsageError

if TYPE_CHECKING:
    from k31compile.entry import Entry
    from k31compile.onnx_export.check import Compared
    from k31compile.onnx_export.export import OnnxGraph

    Made = tuple[OnnxGraph, list[Path], list[Compared]]


def export(
    target_name: Annotated[str, typer.Argument(metavar="TARGET", help=target.HELP)],
    file: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.onnx", help="Where the model is written.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX, each k31 operator a function.")] = False,
    entry: Annotated[str | None, typer.Option(metavar="NAME", help="This entry of the target only.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Run it with onnxruntime and compare with eager.")] = False,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16; default: as the entry is, fp32 if shipped.")] = None,
    layers: Annotated[int | None, typer.Option(help="Build a shipped model with its first N layers only.")] = None,
) -> int:
    """Write the fused graph of each entry of a target; several entries get a file each, FILE.ENTRY.onnx."""
    if not onnx:
        raise UsageError("k31 export makes ONNX models only", hint="add --onnx")
    from k31compile.onnx_export.files import require_place
    from k31compile.onnx_export.libraries import require_onnx

    require_place(file)
    require_onnx()
    entries = _chosen(target.load_entries(target_name, dtype, layers), entry)
    made: list[Made] = []
    with console.progress("export", len(entries)) as advance:
        for each in entries:
            advance(each.name)
            made.append(_export(each, file if len(entries) == 1 else _beside(file, each.name), check))
    data = {"target": target_name, "entries": {one[0].name: _data(*one) for one in made}}
    console.emit(data, lambda out: _render(made, out))
    return _verdict(made)


def _chosen(entries: list[Entry], name: str | None) -> list[Entry]:
    if name is None:
        return entries
    found = [entry for entry in entries if entry.name == name]
    if not found:
        listed = ", ".join(entry.name for entry in entries)
        raise UsageError(f"the target has no entry {name!r}", hint=f"entries: {listed}")
    return found


def _beside(file: Path, name: str) -> Path:
    return file.with_name(f"{file.stem}.{name.replace(':', '-').replace('/', '-')}{file.suffix}")


def _export(entry: Entry, file: Path, check: bool) -> Made:
    from k31compile.onnx_export.check import compare_with_eager
    from k31compile.onnx_export.export import export_entry
    from k31compile.onnx_export.files import write_model

    with calling(entry):
        graph = export_entry(entry)
    files = write_model(graph, file)
    return graph, files, compare_with_eager(entry, graph, file) if check else []


def _data(graph: OnnxGraph, files: list[Path], compared: list[Compared]) -> dict[str, Any]:
    found = {one.name: one.difference if one.difference != float("inf") else None for one in compared}
    return {**graph.to_dict(), "files": [str(file) for file in files], "compared": found}


def _verdict(made: list[Made]) -> int:
    from k31compile.onnx_export.check import require_same

    compared = [one for _, _, found in made for one in found]
    if console.json_wanted():
        return 0 if all(one.ok for one in compared) else 1
    require_same(compared)
    return 0


def _render(made: list[Made], out: Console) -> None:
    for graph, files, compared in made:
        data = graph.to_dict()
        table = console.table("k31 function", "calls", "kinds")
        for operator, count in data["operators"].items():
            table.add_row(operator, str(count), str(sum(kind.operator == operator for kind in graph.kinds)))
        out.print(f"{graph.name}: opset {data['opset']}, {data['nodes']} nodes; {data['sizes']}", highlight=False)
        out.print(table)
        out.print(
            f"{len(data['inputs'])} inputs, {len(data['outputs'])} outputs, of which {len(data['written'])} are new "
            f"values of inputs; {data['weights']} weights and constants, {data['weight_bytes']:,} bytes",
            highlight=False,
        )
        if compared:
            worst = max(compared, key=lambda one: one.difference)
            out.print(
                f"onnxruntime against eager: {len(compared)} outputs, {worst.name} differs most, by "
                f"{worst.difference:.1e} of its largest value",
                markup=False,
                highlight=False,
            )
        out.print(f"written: {', '.join(map(str, files))}\n", markup=False, highlight=False)
