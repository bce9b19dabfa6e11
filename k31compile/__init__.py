"""k31compile: plain PyTorch K3.1-style models in, fused graphs for CPU, GPU and Ascend NPU out.

``torch.compile(model, backend="k31")`` needs no import of this package; what is here is for those who
want a report, a check or options by name. Names are loaded on first use, so importing the package is
cheap and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k31compile.options import Options as Options
    from k31compile.report import Report as Report
    from k31compile.report import last_report as last_report
    from k31compile.report import reports as reports

__version__ = "0.1.0"

_HOMES = {
    "Options": "k31compile.options",
    "Report": "k31compile.report",
    "last_report": "k31compile.report",
    "reports": "k31compile.report",
}

__all__ = ["Options", "Report", "last_report", "reports"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'k31compile' has no attribute {name!r}")
