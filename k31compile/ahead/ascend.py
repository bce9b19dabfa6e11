"""F.k31 for an Ascend product: graph, options, streams and weight formats, made without CANN and without an NPU."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from k31compile.ahead.make import Progress, example_of, placed_weights, prepare_folder, without_times
from k31compile.ahead.variants import replaced
from k31compile.ahead.weight_table import WeightTable
from k31compile.cache.artefact.arguments import Described, describe
from k31compile.cache.artefact.container import canonical, write_artefact
from k31compile.cache.artefact.flags import kernels_digest
from k31compile.cache.artefact.payloads import installed_versions
from k31compile.cache.artefact.signature import bind, describe_signature, signature_of
from k31compile.cache.artefact.tensors import Mismatch
from k31compile.entry import Entry
from k31compile.errors import ArtefactError
from k31compile.offline import OfflineGraph, compile_offline

_GRAPHS = {"ge": "graph.pbtxt", "npugraph_ex": "graph.py"}


@dataclass(frozen=True)
class Product:
    """For which product, and how: as `compile_offline` takes it."""

    target: str
    streams: int = 4
    super_kernel: bool = True
    mode: str = "ge"
    may_round: bool = False


def make_ascend_artefact(
    entries: Sequence[Entry], path: Path, product: Product, weights: Path | None, progress: Progress
) -> dict[str, Any]:
    """Compile every entry for a product and write F.k31; return what is in it, as JSON has it.

    Raises:
        ArtefactError: an entry has dynamic sizes, or its arguments are no plain data.
        K31Error: as `compile_offline`.
    """
    prepare_folder(path)
    table, told = WeightTable(), {}
    files: dict[str, bytes] = {}
    payloads = []
    for number, entry in enumerate(entries):
        if entry.dynamic:
            raise ArtefactError(
                "dynamic sizes are not for Ascend graphs", f"entry {entry.name!r}", hint="fix the sizes"
            )
        progress.begins(entry.name, f"entry {number + 1} of {len(entries)}, ahead of time for {product.target}")
        begin = time.perf_counter()
        described = _described(entry)
        graph = compile_offline(
            entry, product.target, product.streams, product.super_kernel, product.mode, product.may_round
        )
        payloads.append(_payload(entry, str(number), graph, described, table))
        files |= _files(str(number), graph, described)
        seconds = time.perf_counter() - begin
        progress.add("convert", seconds)
        told[entry.name] = _told(graph, described, seconds)
    begin = time.perf_counter()
    filed = placed_weights(table, entries, weights, path)
    manifest = {
        "machine": None,
        "kernels": kernels_digest(),
        "operators": {},
        "training": any(isinstance(entry.model, nn.Module) and entry.model.training for entry in entries),
        "weights": filed.to_data(),
        "tensors": filed.tensors,
        "entries": [],
        "payloads": payloads,
    }
    write_artefact(path, manifest, files, filed.places(path))
    progress.add("write", time.perf_counter() - begin)
    listed = [str(file) for file in filed.files]
    counts = [sum(one["file"] == number for one in filed.tensors.values()) for number in range(len(listed))]
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "weights": [{"file": file, "tensors": count} for file, count in zip(listed, counts, strict=True)],
        "entries": told,
    }


def _described(entry: Entry) -> Described:
    args, kwargs = replaced((entry.args, dict(entry.kwargs)), {})
    try:
        return describe(bind(signature_of(entry.model), args, kwargs))
    except Mismatch as mismatch:
        raise ArtefactError(str(mismatch), f"entry {entry.name!r}") from mismatch


def _payload(
    entry: Entry, folder: str, graph: OfflineGraph, described: Described, table: WeightTable
) -> dict[str, Any]:
    """What the manifest has of an entry: its call, where the graph's inputs come from, and what it was made for."""
    formats = {decision.position: decision.is_nz for decision in graph.nz}
    return {
        "name": entry.name,
        "folder": folder,
        "mode": entry.mode,
        "target": graph.profile.name,
        "kind": f"ascend-{graph.profile.path}",
        "graph": _GRAPHS[graph.profile.path],
        "may_round": graph.profile.may_round,
        "versions": graph.versions | _provider_versions(graph),
        "parameters": describe_signature(signature_of(entry.model)),
        "tree": described.tree,
        "tensors": [_tensor(tensor, path) for tensor, path in zip(described.tensors, described.paths, strict=True)],
        "inputs": [
            _input(place, value, entry, described, table) | {"nz": formats.get(place, False)}
            for place, value in enumerate(graph.inputs)
        ],
    }


def _provider_versions(graph: OfflineGraph) -> dict[str, str]:
    """The versions of the installed packages, beside torch_npu, whose operators the graph calls."""
    used = {decision["provider"] for decision in graph.to_dict()["lowered"]} - graph.versions.keys()
    return installed_versions(dict.fromkeys(sorted(used)))


def _tensor(tensor: torch.Tensor, path: str) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"path": path, "dtype": dtype, "shape": list(tensor.shape), "strides": list(tensor.stride())}


def _input(place: int, value: Any, entry: Entry, described: Described, table: WeightTable) -> dict[str, Any]:
    number = described.number_of(value)
    if number is not None:
        return {"tensor": number}
    model = entry.model
    named = {}
    if isinstance(model, nn.Module):
        named = {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    name = named.get(id(value), f"input.{place}")
    if value.device.type == "cpu":  # a model on the meta device has shapes alone
        name = table.add(name, value, entry.name, is_written=False)
    return {"weight": name, **_tensor(value, name)}


def _files(folder: str, graph: OfflineGraph, described: Described) -> dict[str, bytes]:
    is_ge = graph.profile.path == "ge"
    texts: dict[str, Any] = {
        "schedule.json": graph.schedule.to_dict(),
        "report.json": without_times(graph.to_dict()),
        **({"options.json": _options()} if is_ge else {}),
    }
    files = {f"{folder}/{name}": canonical(data) for name, data in texts.items()}
    files[f"{folder}/{_GRAPHS[graph.profile.path]}"] = (graph.ge.text() if is_ge else graph.acl.code).encode()
    files[f"{folder}/fx.txt"] = f"{(graph.lowered if is_ge else graph.acl).module.graph}\n".encode()
    example = example_of(described.tensors)
    if example is not None:
        files[f"{folder}/example.safetensors"] = example
    return files


def _options() -> Mapping[str, Any]:
    from k31compile.targets.ascend.ge_options import ge_options

    return ge_options()


def _told(graph: OfflineGraph, described: Described, seconds: float) -> dict[str, Any]:
    data = graph.to_dict()
    fused: dict[str, int] = {}
    for decision in data["lowered"]:
        fused[decision["operator"]] = fused.get(decision["operator"], 0) + 1
    return {
        "fused": fused,
        "sizes": {},
        "inputs": {path: list(tensor.shape) for path, tensor in zip(described.paths, described.tensors, strict=True)},
        "seconds": {"convert": round(seconds, 3)},
        "target": data["target"],
        "verified": data["verified"],
    }
