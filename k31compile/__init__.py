"""k31compile: plain PyTorch K3.1-style models in, fused graphs for CPU, GPU and Ascend NPU out.

``torch.compile(model, backend="k31")`` needs no import of this package; what is here is for those who
want a report, a check or options by name. Names are loaded on first use, so importing the package is
cheap and does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k31compile.backend import compile as compile
    from k31compile.cache.artefact.load import load as load
    from k31compile.check import check as check
    from k31compile.entry import Entry as Entry
    from k31compile.explain import explain as explain
    from k31compile.leaves.declare import equivalent as equivalent
    from k31compile.options import Options as Options
    from k31compile.report import Report as Report
    from k31compile.report import last_report as last_report
    from k31compile.report import reports as reports

__version__ = "0.1.0"

_HOMES = {
    "compile": "k31compile.backend",
    "explain": "k31compile.explain",
    "load": "k31compile.cache.artefact.load",
    "check": "k31compile.check",
    "equivalent": "k31compile.leaves.declare",
    "Options": "k31compile.options",
    "Entry": "k31compile.entry",
    "Report": "k31compile.report",
    "last_report": "k31compile.report",
    "reports": "k31compile.report",
}

__all__ = [
    "Entry",
    "Options",
    "Report",
    "check",
    "compile",
    "equivalent",
    "explain",
    "last_report",
    "load",
    "reports",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'k31compile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds a submodule to its package. k31compile.explain is a function with a
        # module of the same name behind it: the function must stay what users get.
        if not (isinstance(value, ModuleType) and name in _HOMES):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
