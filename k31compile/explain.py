"""What the compiler would do with a model: one call, operator by operator, and the report over all its graphs."""

from typing import Any

import torch
from torch import nn

from k31compile.notes import take_notes
from k31compile.report import Report, reports


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Report:
    """Run one call of `model` through the compiler without generating code, and return the report over its graphs.

    The call really happens: caches that the model writes are written. Gradients are off.
    """
    return explain_with({"codegen": "ops"}, model, *args, **kwargs)


def explain_with(options: dict[str, Any], model: nn.Module, *args: Any, **kwargs: Any) -> Report:
    """Like `explain`, under these options."""
    known = len(reports())
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters["graph_break"].clear()
    take_notes()
    compiled = torch.compile(model, backend="k31", options=options)
    with torch.no_grad():
        compiled(*args, **kwargs)
    report = Report.merge(reports()[known:])
    # The last function of a call may be one that no graph follows.
    report.notes += take_notes()
    report.graph_breaks = sum(counters["graph_break"].values())
    return report
