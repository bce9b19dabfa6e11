"""The graph of one call, taken out of a compile where the target's code generator would begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from k31compile.errors import K31Error, TraceError
from k31compile.options import Options
from k31compile.report import Report, reports

Compiled = Callable[..., Any]
Then = Callable[[fx.GraphModule, tuple[Any, ...], Report], Compiled]


@dataclass
class Capture:
    """A target whose passes run, and the graph that came out of them.

    `then` takes graph, inputs and report in the place of the target's code generator; without it the compile ends.
    """

    target: str
    then: Then | None = None
    graph: fx.GraphModule | None = None
    inputs: tuple[Any, ...] = ()


class GraphCapturedError(Exception):
    """Ends a compile whose graph somebody asked for with `captured_graph`."""


# An error of the model's own call comes as the second, a branch on a size that depends on values as the last.
_NOT_ONE_GRAPH = (
    torch._dynamo.exc.Unsupported,
    torch._dynamo.exc.TorchRuntimeError,
    torch._dynamo.exc.UserError,
    GuardOnDataDependentSymNode,
)

capturing: ContextVar[Capture | None] = ContextVar("capturing", default=None)
"""What the backend fills in the place of a compile."""


def captured_graph(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], target: str
) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """The one graph of a call after the passes of a target, and the tensors that it takes; nothing of it is run.

    Raises:
        TraceError: Dynamo does not make one graph of the call, with its reason.
    """
    capture, before = Capture(target), len(reports())
    try:
        _call(capture, torch.compile(model, backend="k31", fullgraph=True, dynamic=False), args, kwargs)
    except TraceError:
        raise
    except Exception:
        if capture.graph is None:
            raise
    if capture.graph is None:
        raise _no_graph(before)
    return capture.graph, capture.inputs


def captured_call(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, then: Then
) -> Any:
    """What one call gives when `then` makes the callable of its one graph, from graph, inputs and report.

    Sizes that the caller has marked are dynamic, and no others.

    Raises:
        TraceError: Dynamo does not make one graph of the call, or it would go to Inductor as it is; with the reason.
    """
    capture, before = Capture(options.target or "cpu", then), len(reports())
    plain = {name: value for name, value in vars(options).items() if value != getattr(Options(), name)}
    compiled = torch.compile(model, backend="k31", fullgraph=True, options=plain)
    try:
        result = _call(capture, compiled, args, kwargs)
    except Exception as error:
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, K31Error):
            raise inner from error
        raise
    if capture.graph is None:
        raise _no_graph(before)
    return result


def _call(capture: Capture, compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    torch._dynamo.reset()
    token = capturing.set(capture)
    try:
        return compiled(*args, **kwargs)
    except _NOT_ONE_GRAPH as error:
        why = str(error).strip().splitlines()[0]
        raise TraceError(f"the model is not one graph: {why}", hint="torch._dynamo.explain names the place") from error
    finally:
        capturing.reset(token)


def _no_graph(before: int) -> TraceError:
    """Of a call that made no graph of ours, after so many reports."""
    notes = [note for report in reports()[before:] for note in report.notes] or ["it compiled nothing"]
    return TraceError(f"there is no graph of this call: {notes[-1]}", hint="k31 explain says more of it")
