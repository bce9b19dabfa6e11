"""A confirmed call as one node of Dynamo's graph."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from k31compile.leaves.call import Call
from k31compile.leaves.candidates import Candidate
from k31compile.leaves.form import Evidence, Form
from k31compile.leaves.globals import line_of
from k31compile.leaves.reading import CalledReading
from k31compile.report import as_remembered


class Kept(ABC):
    """What a node of Dynamo's graph stands for where the author's code was not traced into."""

    @abstractmethod
    def identity(self) -> str:
        """Equal for calls that differ in sizes alone."""

    @abstractmethod
    def digest(self) -> str:
        """Equal in every process for what computes the same, whatever it is called with; for keys of the cache."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """What a report says of it, as plain JSON values."""


@dataclass(frozen=True)
class Leaf(Kept):
    """A function's call, kept whole: its form, how it came to be known, and whether it was before this call."""

    call: Call
    form: Form
    candidate: Candidate
    remembered: bool = False

    def target(self) -> Callable[..., Any]:
        """What stands in the graph: takes the call's tensors in their order, gives what the function returns.

        It computes with the operator; traced or run on fake tensors it costs the same for every length.
        """
        names = tuple(self.call.tensors)
        reading = CalledReading(self.form)

        def leaf(*tensors: torch.Tensor) -> Any:
            return reading.program(dict(zip(names, tensors, strict=True)))

        leaf.__name__ = leaf.__qualname__ = f"k31_leaf_{self.call.function.__name__}"
        leaf.k31_leaf = self  # type: ignore[attr-defined]
        leaf.k31_digest = self.digest()  # type: ignore[attr-defined]
        return leaf

    def original(self, *tensors: torch.Tensor) -> Any:
        """What the author's function gives for these tensors."""
        return self.call.run(dict(zip(self.call.tensors, tensors, strict=True)))

    def identity(self) -> str:
        """Equal for calls that differ in sizes alone."""
        return f"{id(self.call.function)} {self.form.operator} {self.call.key()}"

    def digest(self) -> str:
        """A hash of the function, of the constants of the call, and of the form that it was confirmed to have."""
        assert self.candidate.source is not None
        form = replace(self.form, evidence=Evidence(0, (), 0.0))
        # Sorted, for a form that was read from a file has its operands in another order.
        text = json.dumps(form.to_dict(), sort_keys=True)
        return digest_texts(self.candidate.source.digest, self.call.key(), text)

    def to_dict(self) -> dict[str, Any]:
        """What a report says of it, as plain JSON values."""
        seen = self.form.evidence
        found = {
            "function": self.call.function.__qualname__,
            "where": line_of(self.call.function),
            "operator": self.form.operator,
            "why": self.candidate.why,
            "samples": seen.samples,
            "lengths": list(seen.lengths),
            "worst_error": seen.worst_error,
            "remembered": False,
            "text": f"confirmed on {seen.samples} samples in float64, by calling it",
        }
        return as_remembered(found) if self.remembered else found


def digest_texts(*texts: str) -> str:
    """One hash over several texts."""
    return hashlib.sha256("\x1f".join(texts).encode()).hexdigest()


def leaf_calls(module: fx.GraphModule) -> Iterator[tuple[fx.Node, Kept]]:
    """The leaves in Dynamo's graph and in the graphs inside it."""
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            for node in child.graph.nodes:
                leaf = getattr(node.target, "k31_leaf", None) if node.op == "call_function" else None
                if isinstance(leaf, Kept):
                    yield node, leaf


def count_leaves(module: fx.GraphModule) -> list[dict[str, Any]]:
    """What a report says of the leaves in a graph, calls that differ in sizes alone as one."""
    counts: Counter[str] = Counter()
    found: dict[str, dict[str, Any]] = {}
    for _, leaf in leaf_calls(module):
        key = leaf.identity()
        counts[key] += 1
        found.setdefault(key, leaf.to_dict())
    return [{**entry, "calls": counts[key]} for key, entry in found.items()]


def as_written(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with the author's functions called where leaves stood, in place: for a graph that is not rewritten.

    What no graph can hold as it was written, a loop over data, stays the operator.
    """
    functions = [(node, leaf) for node, leaf in leaf_calls(module) if isinstance(leaf, Leaf)]
    changed = {node.graph.owning_module for node, _ in functions} - {None}
    for node, leaf in functions:
        node.target = _calling(leaf)
    for graph_module in changed:
        assert graph_module is not None
        graph_module.recompile()
    return module


def _calling(leaf: Leaf) -> Callable[..., Any]:
    def as_it_was(*tensors: torch.Tensor) -> Any:
        return leaf.original(*tensors)

    as_it_was.__name__ = as_it_was.__qualname__ = f"as_written_{leaf.call.function.__name__}"
    return as_it_was
