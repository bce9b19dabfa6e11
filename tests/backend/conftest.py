"""What the backend's tests share: eager with a fixed rule for ties, fresh compiler state, the rewritten graph."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.overrides import TorchFunctionMode

import k31compile.backend
from k31compile.report import Report, clear_reports, reports


class LowerPositionFirst(TorchFunctionMode):
    """Eager top-k with the rule of K3.1 spec 2.8: equal scores go to the lower position."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        count = args[1] if len(args) > 1 else kwargs["k"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        values, indices = torch.sort(args[0], dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, count), indices.narrow(dim, 0, count)))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graph and no report of an earlier test; nothing of this one stays."""
    torch._dynamo.reset()
    clear_reports()
    yield
    torch._dynamo.reset()


@pytest.fixture
def eager() -> type[LowerPositionFirst]:
    """`with eager(): ...` runs eager code whose ties are those of the operators."""
    return LowerPositionFirst


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Every graph that the target was given, in order."""
    graphs: list[fx.GraphModule] = []
    compile_for_cpu = k31compile.backend.compile_for_cpu

    def keep(module: fx.GraphModule, *rest: Any) -> Callable[..., Any]:
        graphs.append(module)
        return compile_for_cpu(module, *rest)

    monkeypatch.setattr(k31compile.backend, "compile_for_cpu", keep)
    return graphs


@pytest.fixture
def fused() -> Callable[[], list[dict[str, int]]]:
    """What was fused in each graph so far."""

    def read() -> list[dict[str, int]]:
        found: list[Report] = reports()
        return [report.fused for report in found]

    return read
