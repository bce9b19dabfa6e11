"""The file of a fusion contract: TOML, one line a layer, the same text for the same facts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k31compile.errors import LockError
from k31compile.report import Report
from k31compile.store import atomic_write

FORMAT = 1
DEFAULT_NAME = "k31.lock"
_BYTES = ("weights", "inputs", "peak")
_FIRST = "# Fusion contract of k31compile"
_HEAD = """\
{first}: what each layer of a model got, and what its graphs need of memory.
# Held by `k31 check {target} --lock {name}`, and graph by graph by options={{"lock": "{name}"}}.
# After a change that was meant, renew it:  k31 explain {target} --lock {name}
"""


@dataclass(frozen=True)
class Graph:
    """What one graph got.

    Attributes:
        entry: the entry whose call made it, and `number` its place among that call's graphs, from 1.
        inputs: dtype and shape of the inputs that are no weights, sorted.
        layers: path of a module -> operator -> call sites.
        contains: operator -> how many of it larger operators took in, in the whole graph.
        memory: bytes of weights, inputs and of all else at its peak; a graph just made also knows `at` which line.
    """

    entry: str
    number: int
    inputs: tuple[str, ...] = ()
    layers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    contains: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contract:
    """All graphs of a target, in the order in which they were made."""

    target: str
    graphs: tuple[Graph, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> list[str]:
        """The names of its entries, each once."""
        return list(dict.fromkeys(graph.entry for graph in self.graphs))

    def of_entry(self, entry: str) -> list[Graph]:
        """The graphs of one entry."""
        return [graph for graph in self.graphs if graph.entry == entry]


def graphs_of(entry: str, reports: Iterable[Report]) -> list[Graph]:
    """The graphs of one call, from their reports."""
    return [graph_of(report, entry, number) for number, report in enumerate(reports, 1)]


def graph_of(report: Report, entry: str = "", number: int = 1) -> Graph:
    """One graph from its report."""
    return Graph(entry, number, tuple(report.inputs), report.layers, report.contains, report.memory)


def write_contract(path: Path, contract: Contract) -> None:
    """Write a contract, in place of an older one.

    Raises:
        LockError: a file is there that is none of ours, or the folder cannot be written.
    """
    if path.exists() and not _begins_as_ours(path):
        raise LockError("this file is no fusion contract and is left as it is", str(path), hint="choose another name")
    try:
        atomic_write(path, _text(contract, path.name).encode(), mode=0o644)
    except OSError as error:
        raise LockError(f"the contract cannot be written: {error.strerror}", str(path), hint="") from error


def read_contract(path: Path) -> Contract:
    """Read a contract.

    Raises:
        LockError: it is missing, no contract, damaged, or of another format.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LockError("there is no fusion contract", str(path)) from None
    except OSError as error:
        raise LockError(f"the contract cannot be read: {error.strerror}", str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LockError(f"the contract is damaged: {error}", str(path)) from error
    if not isinstance(data.get("format"), int) or "graph" not in data:
        raise LockError("this is no fusion contract", str(path))
    if data["format"] != FORMAT:
        raise LockError(f"the contract has format {data['format']}, this version reads {FORMAT}", str(path))
    try:
        graphs = tuple(_graph(part) for part in data["graph"])
        return Contract(str(data["target"]), graphs, _of(data["versions"], str))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LockError(f"the contract is damaged: {type(error).__name__} {error}", str(path)) from error


def _graph(data: Mapping[str, Any]) -> Graph:
    layers = {str(path): _of(counts, int) for path, counts in data["layers"].items()}
    inputs = tuple(str(each) for each in data["inputs"])
    memory = _of({part: data["bytes"][part] for part in _BYTES}, int)
    return Graph(str(data["entry"]), int(data["number"]), inputs, layers, _of(data["contains"], int), memory)


def _of(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    for name, value in values.items():
        if type(value) is not kind:
            raise ValueError(f"at {name!r}: {value!r}")
    return dict(values)


def _begins_as_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_FIRST)) == _FIRST.encode()
    except OSError:
        return False


def _text(contract: Contract, name: str) -> str:
    lines = [_HEAD.format(first=_FIRST, target=contract.target, name=name)]
    lines += [
        f"format = {FORMAT}",
        f"target = {json.dumps(contract.target)}",
        f"versions = {_table(contract.versions)}",
    ]
    for graph in contract.graphs:
        lines += ["", "[[graph]]", f"entry = {json.dumps(graph.entry)}", f"number = {graph.number}"]
        lines += ["inputs = [", *(f"    {json.dumps(each)}," for each in graph.inputs), "]"]
        lines += [
            f"bytes = {_table({part: graph.memory[part] for part in _BYTES})}",
            f"contains = {_table(graph.contains)}",
            "",
            "[graph.layers]",
        ]
        lines += [f"{json.dumps(path)} = {_table(counts)}" for path, counts in graph.layers.items()]
    return "\n".join(lines) + "\n"


def _table(values: Mapping[str, Any]) -> str:
    pairs: Sequence[str] = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
