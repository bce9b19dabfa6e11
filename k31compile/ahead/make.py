"""F.k31 from a list of entries: every phase and bucket of a model in one file."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from k31compile.ahead.capture import Built, build_entry
from k31compile.ahead.variants import variants, with_sizes
from k31compile.ahead.weight_table import SOURCE, Filed, WeightTable, refuse_foreign
from k31compile.cache.artefact.container import canonical, write_artefact
from k31compile.cache.artefact.flags import kernels_digest, machine
from k31compile.cache.artefact.load import KERNELS
from k31compile.entry import Entry
from k31compile.errors import ArtefactError, BuildError, StoreError
from k31compile.kernels.cpu.build import built_library
from k31compile.options import Options
from k31compile.targets.native.load import EXTERNS, LIBRARY

SUFFIX = ".k31"
_EXAMPLE_BYTES = 16 << 20
_TIMES = ("seconds", "phases")


@dataclass
class Progress:
    """What is told while an artefact is made, and what took how long.

    `begins(name, reason)` is called at the start of each compile, `tell(text)` at the start of each part of one.
    """

    begins: Callable[[str, str], None] = lambda name, reason: None
    tell: Callable[[str], None] = lambda text: None
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, phase: str, seconds: float) -> None:
        """Add to the time of a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def make_artefact(
    entries: Sequence[Entry],
    path: Path,
    weights: Path | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compile every entry and write F.k31; return what is in it, as JSON has it.

    Weights are taken by reference from `weights`, a safetensors file or folder, or from where the model was loaded;
    what is in neither is written to F.safetensors beside it.

    Raises:
        ArtefactError: an entry's call cannot be written down as plain data, its graph cannot be built to a library, or
            two entries take the same calls; or F.safetensors is there and is somebody else's.
        TraceError: an entry is not one graph.
        StoreError: the file cannot be signed or written.
    """
    progress = progress or Progress()
    chosen = options or Options()
    if chosen.target not in (None, "cpu"):
        raise ArtefactError(f"an artefact for {chosen.target} is not made here", hint="leave target out, or say cpu")
    compiles = [variant for entry in entries for variant in variants(entry)]
    declared = _declared(entries)
    _check_names(compiles)
    if weights is None and not _sources(entries):
        refuse_foreign(_own_weights(path))
    prepare_folder(path)
    with tempfile.TemporaryDirectory(prefix="k31-ahead-") as scratch:
        built: list[Built] = []
        while len(built) < len(compiles):
            number = len(built)
            entry = compiles[number]
            folder = Path(scratch) / str(number)
            folder.mkdir()
            progress.begins(entry.name, _reason(entry, number, len(compiles)))
            one = build_entry(entry, folder, chosen, progress.tell, declared)
            for phase, seconds in one.seconds.items():
                progress.add(phase, seconds)
            _check_apart(one, built)
            built.append(one)
            compiles += [with_sizes(entry, sizes) for sizes in one.left_out]
        return _write(built, path, weights, progress)


def prepare_folder(path: Path) -> None:
    """Make the folder of a file that is written once minutes have passed, and see whether it takes one.

    Raises:
        StoreError: it does not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        what = f"the folder of {path.name} cannot be written: {error.strerror}"
        raise StoreError(what, str(path.parent), hint="give -o another folder") from error


def _reason(entry: Entry, number: int, count: int) -> str:
    sizes = ", ".join(
        dict.fromkeys(f"{n} {lo}..{hi}" for dims in entry.dynamic.values() for n, lo, hi in dims.values())
    )
    return f"entry {number + 1} of {count}, ahead of time" + (f", sizes {sizes}" if sizes else "")


def _declared(entries: Sequence[Entry]) -> dict[str, tuple[int, int]]:
    """The bounds of every dynamic size by its name."""
    found = [bound for entry in entries for dims in entry.dynamic.values() for bound in dims.values()]
    declared = {name: (low, high) for name, low, high in found}
    for name, low, high in found:
        if declared[name] != (low, high):
            raise ArtefactError(f"the size {name} has other bounds in two entries", hint="use one name per size")
    return declared


def _check_names(entries: Sequence[Entry]) -> None:
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ArtefactError(f"two entries are called {name!r}", hint="give each a name of its own")
    modes = {entry.model.training for entry in entries if isinstance(entry.model, nn.Module)}
    if len(modes) > 1:
        raise ArtefactError("some models are in train mode and some in eval mode", hint="call .eval() on all of them")


def _check_apart(one: Built, others: Sequence[Built]) -> None:
    """Raise where a call would fit two entries."""
    promise = ("parameters", "tree", "tensors", "flags", "sizes")
    for other in others:
        if all(one.data[part] == other.data[part] for part in promise):
            raise ArtefactError(
                f"entries {other.entry.name!r} and {one.entry.name!r} take the same calls",
                hint="leave one out, or give it other sizes",
            )


def _write(built: Sequence[Built], path: Path, weights: Path | None, progress: Progress) -> dict[str, Any]:
    progress.tell("weights")
    start = time.perf_counter()
    table = WeightTable()
    for one in built:
        names = {
            name: table.add(name, tensor, one.entry.name, name in one.written) for name, tensor in one.weights.items()
        }
        for source in one.data["inputs"]:
            if "weight" in source:
                source["weight"] = names[source["weight"]]
    had_weights = _own_weights(path).exists()
    filed = placed_weights(table, [one.entry for one in built], weights, path)
    middle = time.perf_counter()
    progress.tell("write")
    files = _files(built)
    manifest = {
        "machine": machine(),
        "kernels": kernels_digest(),
        "operators": {name: schema for one in built for name, schema in one.operators.items()},
        "training": any(isinstance(one.entry.model, nn.Module) and one.entry.model.training for one in built),
        "weights": filed.to_data(),
        "tensors": filed.tensors,
        "entries": [one.data for one in built],
        "payloads": [],
    }
    try:
        write_artefact(path, manifest, files, filed.places(path))
    except StoreError:
        if not had_weights:
            _own_weights(path).unlink(missing_ok=True)
        raise
    progress.add("weights", middle - start)
    progress.add("write", time.perf_counter() - middle)
    return _told(built, path, filed)


def placed_weights(table: WeightTable, entries: Sequence[Entry], weights: Path | None, path: Path) -> Filed:
    """The weights in the files that the caller or the models name, the others in a file beside the artefact."""
    return table.file_them(_sources(entries), weights, _own_weights(path))


def _sources(entries: Sequence[Entry]) -> list[Path]:
    """Where the models of the entries were loaded from, as they say themselves."""
    found = [getattr(entry.model, SOURCE, None) for entry in entries]
    return list(dict.fromkeys(Path(place) for place in found if place is not None and Path(place).exists()))


def _own_weights(path: Path) -> Path:
    """The file beside an artefact for the weights that are in no checkpoint."""
    return path.with_suffix(".safetensors")


def _files(built: Sequence[Built]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for one in built:
        name = one.data["folder"]
        files[f"{name}/{LIBRARY}"] = (one.folder / LIBRARY).read_bytes()
        files[f"{name}/{EXTERNS}"] = (one.folder / EXTERNS).read_bytes()
        files[f"{name}/graph.txt"] = one.graph_text.encode()
        # What was confirmed now and what was remembered are one, so that two makes give one text.
        told = one.report.to_dict() | one.report.to_kept()
        files[f"{name}/report.json"] = canonical(without_times(told))
        example = example_of(one.tensors)
        if example is not None:
            files[f"{name}/example.safetensors"] = example
    if any(operator.startswith("k31::") for one in built for operator in one.operators):
        try:
            files[KERNELS] = built_library().read_bytes()
        except BuildError as error:
            raise ArtefactError(f"the kernels that it needs cannot be built: {error}") from error
    return files


def example_of(tensors: Sequence[torch.Tensor]) -> bytes | None:
    """The values of an entry's tensors as a safetensors file; None where they are large or have none."""
    if sum(tensor.nbytes for tensor in tensors) > _EXAMPLE_BYTES or any(tensor.is_meta for tensor in tensors):
        return None
    return save({str(i): tensor.detach().contiguous().clone() for i, tensor in enumerate(tensors)})


def without_times(value: Any) -> Any:
    """A report without what differs between two runs."""
    if isinstance(value, Mapping):
        return {key: without_times(part) for key, part in value.items() if key not in _TIMES}
    return [without_times(part) for part in value] if isinstance(value, list | tuple) else value


def _told(built: Sequence[Built], path: Path, filed: Filed) -> dict[str, Any]:
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "weights": [
            {"file": str(file), "tensors": sum(one["file"] == number for one in filed.tensors.values())}
            for number, file in enumerate(filed.files)
        ],
        "entries": {
            one.entry.name: {
                "fused": one.report.fused,
                "sizes": one.data["sizes"],
                "inputs": {promise["path"]: promise["shape"] for promise in one.data["tensors"]},
                "seconds": {phase: round(seconds, 3) for phase, seconds in one.seconds.items()},
            }
            for one in built
        },
    }
