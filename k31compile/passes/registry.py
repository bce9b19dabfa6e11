"""What a pass is, and the register of all passes: duplicates, unknown names and cycles raise."""

import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import networkx as nx
from torch import fx

import k31compile.passes
from k31compile.errors import PassError
from k31compile.graph.confirm import Confirmation
from k31compile.options import Options
from k31compile.report import Refusal

Numerics = Literal["exact", "reassociated", "quantised"]

_FOLDERS = ("fusion", "layout", "quant", "schedule", "parallel")


@dataclass
class PassResult:
    """What a pass did to a graph: how many places it changed, what it refused and what it confirmed."""

    changed: int = 0
    refused: list[Refusal] = field(default_factory=list)
    confirmations: list[Confirmation] = field(default_factory=list)


PassFunction = Callable[[fx.GraphModule, Options], PassResult]


@dataclass(frozen=True)
class Pass:
    """A pass with all that it declares.

    Attributes:
        name: verb first, the name of its file.
        fusion: the name by which `fuse=[...]` switches it and the report counts it.
        needs: passes that must have run for it to find anything.
        after: passes that must run earlier.
        targets: where it applies; "all" for everywhere.
        numerics: what it does to the numbers.
        run: changes the graph in place.
    """

    name: str
    fusion: str
    needs: tuple[str, ...]
    after: tuple[str, ...]
    targets: tuple[str, ...]
    numerics: Numerics
    run: PassFunction

    @property
    def identity(self) -> str:
        """A hash of the pass's source: part of what a compiled graph depends on."""
        return hashlib.sha256(inspect.getsource(inspect.getmodule(self.run) or self.run).encode()).hexdigest()

    @property
    def documentation(self) -> str:
        """The docstring, with its blocks Before, After and Refuses when."""
        return inspect.getdoc(self.run) or ""


_PASSES: dict[str, Pass] = {}


def register_pass(
    *,
    name: str,
    fusion: str,
    numerics: Numerics,
    needs: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    targets: tuple[str, ...] = ("all",),
) -> Callable[[PassFunction], PassFunction]:
    """Register the decorated function as a pass.

    Raises:
        PassError: a pass of this name exists.
    """

    def register(run: PassFunction) -> PassFunction:
        if name in _PASSES:
            other = _PASSES[name].run.__module__
            raise PassError(f"pass {name} is registered twice", where=f"{run.__module__}, {other}")
        _PASSES[name] = Pass(name, fusion, needs, after, targets, numerics, run)
        return run

    return register


def all_passes() -> list[Pass]:
    """Every pass in the order in which they run: what they declare decides, then the name.

    Raises:
        PassError: a pass names an unknown one, or the order has a cycle.
    """
    _import_folders()
    return ordered(_PASSES.values())


def ordered(passes: Iterable[Pass]) -> list[Pass]:
    """The passes, each after those that it names.

    Raises:
        PassError: an unknown name, or a cycle.
    """
    by_name = {p.name: p for p in passes}
    graph: nx.DiGraph = nx.DiGraph()
    for p in by_name.values():
        graph.add_node(p.name)
        for earlier in (*p.needs, *p.after):
            if earlier not in by_name:
                raise PassError(
                    f"pass {p.name} stands after {earlier!r}, which does not exist",
                    hint=f"known: {', '.join(sorted(by_name))}",
                )
            graph.add_edge(earlier, p.name)
    try:
        return [by_name[name] for name in nx.lexicographical_topological_sort(graph)]
    except nx.NetworkXUnfeasible:
        cycle = " -> ".join(edge[0] for edge in nx.find_cycle(graph))
        raise PassError(f"the order of passes has a cycle: {cycle}") from None


def _import_folders() -> None:
    for folder in _FOLDERS:
        try:
            package = importlib.import_module(f"{k31compile.passes.__name__}.{folder}")
        except ModuleNotFoundError:
            continue
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
