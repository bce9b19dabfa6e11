"""What the backend's tests share: eager with a fixed rule for ties, fresh compiler state, the rewritten graph."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import k31compile.compile_graph
from k31compile.report import Report, clear_reports, reports

sys.path.insert(0, str(Path(__file__).parents[1] / "recognition"))
from stable_topk import StableTopk


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graph and no report of an earlier test; nothing of this one stays."""
    torch._dynamo.reset()
    clear_reports()
    yield
    torch._dynamo.reset()


@pytest.fixture
def eager() -> type[StableTopk]:
    """`with eager(): ...` runs eager code whose ties are those of the operators."""
    return StableTopk


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Every graph that the target was given, in order."""
    graphs: list[fx.GraphModule] = []
    compile_for_target = k31compile.compile_graph._compile_for_target

    def keep(module: fx.GraphModule, *rest: Any) -> Callable[..., Any]:
        graphs.append(module)
        return compile_for_target(module, *rest)

    monkeypatch.setattr(k31compile.compile_graph, "_compile_for_target", keep)
    return graphs


@pytest.fixture
def fused() -> Callable[[], list[dict[str, int]]]:
    """What was fused in each graph so far."""

    def read() -> list[dict[str, int]]:
        found: list[Report] = reports()
        return [report.fused for report in found]

    return read
