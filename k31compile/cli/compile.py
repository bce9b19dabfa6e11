"""``k31 compile``: a model compiled ahead of its use, to F.k31 or for an Ascend product that is not here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from k31compile.cli import ahead, console, target
from k31compile.cli.require_warm import require_warm_target
from k31compile.cli.warm_file import WarmSpec
from k31compile.errors import UsageError

if TYPE_CHECKING:
    from k31compile.offline import OfflineGraph
    from k31compile.targets.ascend.profiles import Profile


_MADE = {"ge": "GE operators", "npugraph_ex": "calls in the code that is captured"}


def compile(
    target_name: Annotated[str, typer.Argument(metavar="TARGET", help=target.HELP)],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="F.k31", help="The artefact; with --offline a folder for texts."),
    ] = None,
    product: Annotated[str, typer.Option("--target", help="cpu, ascend-a3 or ascend-950.")] = "",
    offline: Annotated[bool, typer.Option("--offline", help="Convert, and stop before a device is needed.")] = False,
    mode: Annotated[str, typer.Option(help="With --offline what is made: ge or npugraph_ex.")] = "ge",
    streams: Annotated[int, typer.Option(help="With --offline the most streams of a schedule, 1 to 4.")] = 4,
    super_kernel: Annotated[bool, typer.Option(help="With --offline merge launches where the product can.")] = True,
    may_round: Annotated[
        bool, typer.Option("--may-round", help="Give operators bfloat16 where the model has float32: changes numbers.")
    ] = False,
    layers: Annotated[int | None, typer.Option(help="Build a shipped model with its first N layers only.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16; default: as the entry is, fp32 if shipped.")] = None,
    entry: Annotated[str | None, typer.Option(metavar="NAME", help="This entry of the target only.")] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE_OR_DIR", help="Safetensors to refer to; else written beside F.k31.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="How many threads F.k31 is for; default: as torch has.")] = None,
    require_warm: Annotated[
        bool, typer.Option("--require-warm", help="Compile nothing: end with 1 where the cache lacks a graph, and why.")
    ] = False,
) -> None:
    """Compile every entry of a target ahead of its use, into one file that starts without a compiler.

    For an Ascend product that needs neither CANN nor an NPU: a GE graph, or with --mode npugraph_ex the code that a
    device would capture. With --offline the graphs are written as texts into a folder instead.

    With --require-warm, and then without -o, every graph has to be in the cache that torch.compile looks in.
    """
    if require_warm:
        if output is not None or offline or weights is not None:
            hint = "leave out what it makes: -o, --offline, --weights"
            raise UsageError("--require-warm makes nothing, it looks into the cache", hint=hint)
        require_warm_target(WarmSpec(target_name, product, dtype=dtype, layers=layers), entry, threads)
        return
    if output is None:
        raise UsageError("nothing says where to", hint="give -o F.k31, or --require-warm to ask the cache only")
    how = (mode, streams, super_kernel, may_round)
    if not offline or output.suffix == ".k31":
        chosen = ahead.Chosen(dtype, layers, entry, weights, threads)
        ahead.compile_ahead(target_name, output, product, chosen, how)
        return
    _compile_offline(target_name, output, product, (*how, layers))


def _compile_offline(
    target_name: str, folder: Path, product: str, how: tuple[str, int, bool, bool, int | None]
) -> None:
    mode, streams, super_kernel, may_round, layers = how
    if not product:
        raise UsageError("--offline needs --target", hint="targets: ascend-a3, ascend-950")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint="give -o a folder")
    if not 1 <= streams <= 4:
        raise UsageError(f"--streams {streams} is more or less than a schedule may use", hint="ask for 1 to 4")
    from k31compile.offline import compile_offline
    from k31compile.targets.ascend.profiles import profile_of

    _load_torch_npu(profile_of(product, mode))
    entries = target.load_entries(target_name, "bf16" if target.is_shipped(target_name) else None, layers)
    made: list[tuple[OfflineGraph, list[Path]]] = []
    with console.progress("compile", len(entries)) as advance:
        for entry in entries:
            advance(entry.name)
            graph = compile_offline(entry, product, streams, super_kernel, mode, may_round)
            made.append((graph, graph.write(folder / entry.name.replace(":", "-"))))
    entries_told = {graph.name: graph.to_dict() | {"written": [str(path) for path in paths]} for graph, paths in made}
    data = {"target": target_name, "entries": entries_told}
    console.emit(data, lambda out: _render(made, out))


def _load_torch_npu(profile: Profile) -> None:
    """Load torch_npu over its stand-ins before the target's file, which may import it itself, as transformers does."""
    from k31compile.targets.ascend.offline.session import open_session

    if importlib.util.find_spec("torch_npu") is not None:
        open_session(profile)


def _render(made: list[tuple[OfflineGraph, list[Path]]], out: Console) -> None:
    for graph, paths in made:
        data = graph.to_dict()
        out.print(f"{graph.name} for {graph.profile.name}: {data['verified']}")
        out.print(
            _lowered(data["lowered"]) if data["lowered"] else "no k31 operator in this graph: k31 explain says why not"
        )
        streams = ", ".join(f"{name} {count}" for name, count in sorted(data["streams"].items()))
        blocks = sum(decision["is_nz"] for decision in data["nz_weights"])
        out.print(f"{_MADE[data['mode']]} by stream: {streams}")
        if "events" in data:
            out.print(f"events: {data['events']}, waits: {data['waits']}, record_streams: {data['record_streams']}")
        out.print(f"weights kept in blocks: {blocks} of {len(data['nz_weights'])}")
        for line in _kept_plain(data["nz_weights"]):
            out.print(f"  {line}", markup=False, highlight=False)
        schedule = data["schedule"]
        serial, predicted, bound = (schedule[key] * 1e6 for key in ("serial", "predicted", "critical_path"))
        out.print(
            f"predicted, not measured, one launch an operator: {predicted:.0f} us in streams, {serial:.0f} us on one, "
            f"at least {bound:.0f} us"
        )
        out.print(_merged(schedule["super_kernels"]))
        out.print(f"written: {', '.join(map(str, paths))}\n")


def _merged(data: dict[str, Any]) -> str:
    if data["why_none"]:
        return f"super kernels: none, since {data['why_none']}"
    return (
        f"super kernels: {data['regions']} with {data['operators']} GE operators; predicted, not measured, with them: "
        f"launches {data['launches_before']} -> {data['launches_after']}, {data['predicted'] * 1e6:.0f} us"
    )


def _kept_plain(decisions: list[dict[str, Any]]) -> list[str]:
    """Which weights are not kept in blocks and why: those that differ by the number of their layer in one line."""
    counts: dict[str, int] = {}
    for decision in decisions:
        if not decision["is_nz"]:
            name = re.sub(r"\.\d+\.", ".*.", decision["name"])
            # In brackets stands which node of the graph it was.
            reason = re.sub(r" \(\w+\)", "", decision["reason"])
            line = f"{name}: {'; '.join(filter(None, (reason, decision['remedy'])))}"
            counts[line] = counts.get(line, 0) + 1
    return [f"plain, {count} of them: {line}" if count > 1 else f"plain: {line}" for line, count in counts.items()]


def _lowered(decisions: list[dict[str, Any]]) -> Table:
    table = Table("k31 operator", "calls", "runs as", "passed over, and why")
    counts: dict[tuple[str, str, str], int] = {}
    for decision in decisions:
        why = "; ".join(dict.fromkeys(decision["passed_over"]))
        key = (decision["operator"], decision["provider"], why)
        counts[key] = counts.get(key, 0) + 1
    for (operator, provider, why), count in sorted(counts.items()):
        table.add_row(operator, str(count), provider, why)
    return table
