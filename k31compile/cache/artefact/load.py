"""Load F.k31: check all of it, load its libraries, and call the entry that a call was promised."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import k31compile.kernels  # noqa: F401  (registers the operators)
from k31compile.cache.artefact.container import Opened, open_artefact
from k31compile.cache.artefact.example import example_tensors
from k31compile.cache.artefact.flags import check_machine, is_in_transform, kernels_digest, missing_operators
from k31compile.cache.artefact.payloads import check_payload
from k31compile.cache.artefact.program import Program
from k31compile.cache.artefact.tensors import ALL_TENSORS_FIT, Mismatch
from k31compile.cache.artefact.unpack import unpacked
from k31compile.cache.artefact.weight_files import find_files, load_tensors
from k31compile.errors import ArtefactError, BuildError, CallRefusedError
from k31compile.kernels.cpu import loader

KERNELS = "kernels.so"
_SHOWN = 4
LOADED = (".so", "library.json")
"""How the names of those files end that are unpacked to be loaded."""


class Artefact:
    """A loaded file. It is called as the model was, and holds the model's weights as it would.

    A call is checked against the promise of each entry; what no entry promises is refused.
    """

    def __init__(self, opened: Opened, weights: str | os.PathLike[str] | None = None) -> None:
        where = str(opened.path)
        manifest = opened.manifest
        self.payloads: list[dict[str, Any]] = manifest["payloads"]
        for payload in self.payloads:
            check_payload(payload, where)
        if manifest["machine"] is not None:
            check_machine(manifest["machine"])
        if manifest["kernels"] != kernels_digest():
            raise ArtefactError("it was made with kernels of another version of k31compile", where)
        if problems := missing_operators(manifest["operators"]):
            hint = "import the package that registers it before k31compile.load"
            raise ArtefactError("; ".join(problems), where, hint=hint)
        given = Path(weights) if weights is not None else None
        files = find_files(manifest["weights"], opened.path, opened.places, given)
        self.weights = load_tensors(files, manifest["tensors"])
        folder = unpacked(opened.digest, {name: data for name, data in opened.files.items() if name.endswith(LOADED)})
        _adopt_kernels(folder / KERNELS, where)
        self.path = opened.path
        self.manifest = manifest
        self._files = opened.files
        self.programs = [Program(entry, folder / entry["folder"], self.weights) for entry in manifest["entries"]]
        # An entry that was compiled for just these sizes is asked before one that takes more.
        self._order = sorted(self.programs, key=lambda program: program.is_dynamic)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the entry whose promise fits.

        Raises:
            CallRefusedError: none does; the text names the argument, what it is, and what is allowed.
        """
        if self.payloads:
            raise _needs_device(self.payloads[0], str(self.path))
        if is_in_transform():
            what = "the call is inside of a transform of torch.func, allowed is a call with tensors as they are"
            raise CallRefusedError(what, str(self.path))
        refused: list[tuple[Program, Mismatch]] = []
        for program in self._order:
            try:
                arguments, tensors = program.take(args, kwargs)
            except Mismatch as mismatch:
                refused.append((program, mismatch))
            else:
                return program.run(arguments, tensors)
        raise _refusal(refused, str(self.path)) from None

    @property
    def training(self) -> bool:
        """Whether the model was in train mode when it was compiled."""
        return bool(self.manifest["training"])

    def train(self, mode: bool = True) -> Artefact:
        """Give the artefact itself, if it was compiled in this mode; CallRefusedError else."""
        if mode != self.training:
            names = {True: "train mode", False: "eval mode"}
            raise CallRefusedError(
                f"the model was compiled in {names[self.training]}, {names[mode]} is another graph",
                str(self.path),
                hint="compile the model in the mode that is wanted",
            )
        return self

    def eval(self) -> Artefact:
        """As `train(False)`."""
        return self.train(False)

    @property
    def entries(self) -> list[str]:
        """The names of its entries."""
        return [*(program.name for program in self.programs), *(payload["name"] for payload in self.payloads)]

    def report(self, entry: str) -> dict[str, Any]:
        """The report of the compile of an entry: what was fused, and the rest of it."""
        payload = next((one for one in self.payloads if one["name"] == entry), None)
        folder = (payload or self.program(entry).data)["folder"]
        found: dict[str, Any] = json.loads(self._files[f"{folder}/report.json"])
        return found

    def example(self, entry: str) -> tuple[list[torch.Tensor], str]:
        """Tensors that an entry takes, and where they come from: its example, or made up where that was large."""
        program = self.program(entry)
        kept = self._files.get(f"{program.data['folder']}/example.safetensors")
        return example_tensors(program, kept), "the entry's example" if kept is not None else "random"

    def program(self, entry: str) -> Program:
        """The entry of a name; CallRefusedError where there is none."""
        for program in self.programs:
            if program.name == entry:
                return program
        for payload in self.payloads:
            if payload["name"] == entry:
                raise _needs_device(payload, str(self.path))
        raise CallRefusedError(f"there is no entry {entry!r}", hint=f"entries: {', '.join(self.entries)}")


def load(path: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None) -> Artefact:
    """Load an artefact; `weights` is where its safetensors files are, if not where they were or beside it.

    Raises:
        ArtefactError: it is missing, damaged, not signed by a key of this user, made for another machine, torch,
            torch_npu or other weights, or needs operators that are not registered.
        StoreError: it belongs to somebody else, or others can write it.
        NativeError: a library of it does not load here.
    """
    return Artefact(open_artefact(Path(path)), weights)


def _adopt_kernels(path: Path, where: str) -> None:
    if not path.exists():
        return
    try:
        loader.adopt(path, why="C++ kernels of the artefact")
    except BuildError as error:
        raise ArtefactError(f"its kernels do not load: {error}", where) from error


def _needs_device(payload: dict[str, Any], where: str) -> CallRefusedError:
    made_by = ", ".join(f"{name} {version}" for name, version in payload["versions"].items())
    what = f"entry {payload['name']!r} is a graph for {payload['target']}, made with {made_by}"
    hint = "compile it for the CPU: k31 compile TARGET -o F.k31; its graph can be looked at with --offline -o DIR"
    return CallRefusedError(f"{what}, and there is no such NPU here", where, hint=hint)


def _refusal(refused: Sequence[tuple[Program, Mismatch]], where: str) -> CallRefusedError:
    """One sentence of what no entry takes: of the entries that come nearest, what each of them allows."""
    if len(refused) == 1:
        return CallRefusedError(str(refused[0][1]), where)
    near = max((_depth(*pair) for pair in refused), default=(0, 0))
    nearest = [pair for pair in refused if _depth(*pair) == near]
    mismatch = nearest[0][1]
    by_text: dict[str, list[str]] = {}
    for program, one in nearest:
        if (one.path, one.found) == (mismatch.path, mismatch.found):
            by_text.setdefault(one.allowed, []).append(program.name)
    told = [name for names in by_text.values() for name in names]
    others = [program.name for program, _ in refused if program.name not in told]
    allowed = " or ".join(f"{text} ({_named(names)})" for text, names in by_text.items())
    more = f"; {_named(others)} differ more" if others else ""
    what = f"{mismatch.path} {mismatch.found}, allowed is {allowed}{more}"
    return CallRefusedError(f"no entry takes this call: {what}", where)


def _named(names: Sequence[str]) -> str:
    return ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])


def _depth(program: Program, mismatch: Mismatch) -> tuple[int, int]:
    """How far the check of a call went: to which argument, and there how far."""
    paths = [promise.path for promise in program.promises]
    if mismatch.nearness >= ALL_TENSORS_FIT:
        return len(paths), mismatch.nearness
    if mismatch.path in paths:
        return paths.index(mismatch.path), mismatch.nearness
    root = mismatch.path.partition(".")[0].partition("[")[0]
    known = [number for number, path in enumerate(paths) if path.startswith(root)]
    if root in program.signature.parameters:
        return (known[0] if known else 0), mismatch.nearness
    return (-1 if mismatch.path == "the call" else len(paths)), 0
