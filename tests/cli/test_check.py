"""The check: it passes what is right, and it can fail, naming the stage, at a kernel, a selection and a graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import k31compile
from k31compile.check import run as check_run
from k31compile.check.distance import filled_up, overlap, regret, relative_error
from k31compile.cli import target
from k31compile.errors import CheckError, UsageError

Run = Callable[..., tuple[int, str, str]]
RunJson = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[torch.Tensor], torch.Tensor]], None]:
    """spoil(operator, change) changes what an operator of the rewritten graph gives where the check runs it."""
    right = fx.Interpreter.call_function

    def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        operator = getattr(torch.ops.k31, name).default

        def wrong(interpreter: fx.Interpreter, called: Any, args: Any, kwargs: Any) -> Any:
            result = right(interpreter, called, args, kwargs)
            return change(result) if called is operator else result

        monkeypatch.setattr(fx.Interpreter, "call_function", wrong)

    return put


def test_what_is_right_passes_at_every_kind_of_stage(small: str, k31: Run) -> None:
    code, out, _ = k31("check", f"{small}:entry", "--all")
    assert code == 0
    for kind in ("trace", "module", "selection", "operator", "output", "compiled"):
        assert kind in out
    assert "all within their bounds" in out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_json_has_every_stage_with_its_errors(dtype: str, small: str, k31_json: RunJson) -> None:
    code, data = k31_json("check", f"{small}:entry", "--dtype", dtype)
    assert code == 0
    assert data["ok"] is True
    assert data["first_wrong"] is None
    assert data["fused"]["lightning_indexer"] == 1
    (selection,) = (stage for stage in data["stages"] if stage["kind"] == "selection")
    assert selection["overlap"] > 0.9
    for stage in data["stages"]:
        assert stage["ok"]
        assert stage["k31"] <= stage["bound"]


def test_a_wrong_kernel_is_named(small: str, k31: Run, k31_json: RunJson, spoil: Any) -> None:
    spoil("sparse_flash_attention", lambda result: result * 1.001)
    code, out, err = k31("check", f"{small}:entry")
    assert code == 1
    assert "WRONG" in out
    last = err.splitlines()[-1]
    assert last.startswith("K31-0601: operator sparse_flash_attention in ")
    assert last.endswith("--all shows every stage before it; options={'fuse': [...]} leaves a fusion out")
    code, data = k31_json("check", f"{small}:entry")
    assert (code, data["ok"]) == (1, False)
    assert data["first_wrong"].startswith("sparse_flash_attention")


def test_a_wrong_selection_is_named(small: str, spoil: Any) -> None:
    def lowest(result: torch.Tensor) -> torch.Tensor:
        places = torch.arange(result.shape[-1], dtype=result.dtype).expand_as(result)
        return torch.where(result < 0, result, places)

    spoil("lightning_indexer", lowest)
    (entry,) = target.load_entries(f"{small}:entry")
    wrong = k31compile.check(entry).first_wrong()
    assert wrong is not None
    assert wrong.kind == "selection"
    assert wrong.overlap is not None
    assert wrong.overlap < 1


def test_a_wrong_graph_is_named_by_its_module(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = check_run.run_pipeline

    def wrong_pipeline(module: Any, options: Any, where: str) -> Any:
        rewritten, stages = right(module, options, where)
        node = rewritten.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0]
        node.args = (node.args[0], node.args[1])  # forgets the bias
        rewritten.recompile()
        return rewritten, stages

    monkeypatch.setattr(check_run, "run_pipeline", wrong_pipeline)
    (entry,) = target.load_entries(f"{small}:entry")
    report = k31compile.check(entry)
    wrong = report.first_wrong()
    assert wrong is not None
    assert (wrong.kind, wrong.name in {"index", "index_key", "weight"}) == ("module", True)
    with pytest.raises(CheckError, match=f"module {wrong.name} is off by "):
        report.require_ok()


def test_arguments_and_buffers_stay_as_they_were() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            x.mul_(2)
            return x + self.seen

    model, x = Counter(), torch.ones(3)
    report = k31compile.check(k31compile.Entry("counter", model, (x,)))
    assert report.ok
    assert {stage.kind for stage in report.stages} >= {"trace", "cache", "output", "compiled"}
    assert torch.equal(x, torch.ones(3))
    assert torch.equal(model.seen, torch.zeros(3))


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to check against called 'numpy'"):
        k31compile.check(k31compile.Entry("x", torch.relu, (torch.ones(2),)), against="numpy")
    with pytest.raises(UsageError, match="meta tensors have no values"):
        k31compile.check(k31compile.Entry("x", torch.relu, (torch.ones(2, device="meta"),)))


def test_a_call_without_a_graph_is_not_called_right() -> None:
    hidden = torch.compiler.disable(lambda x: x + 1)
    report = k31compile.check(k31compile.Entry("hidden", lambda x: hidden(x), (torch.ones(2),)))
    assert not report.ok
    with pytest.raises(CheckError, match="nothing was compared"):
        report.require_ok()


def test_distances() -> None:
    gold = torch.tensor([1.0, -4.0, float("inf")], dtype=torch.float64)
    assert relative_error(gold, gold) == 0
    assert relative_error(torch.tensor([1.0, -4.4, float("inf")]), gold) == pytest.approx(0.1)
    assert relative_error(torch.tensor([1.0, float("nan"), float("inf")]), gold) == float("inf")
    assert relative_error(torch.tensor([1.0, -4.0, 3.0]), gold) == float("inf")
    scores = torch.tensor([[3.0, 1.0, 2.0, 2.0, -torch.inf]])
    assert regret(scores, torch.tensor([[0, 3]])) == 0  # of equal ones either will do
    assert regret(scores, torch.tensor([[0, 1]])) == pytest.approx(1 / 3)
    assert regret(scores, torch.tensor([[0, 4]])) == float("inf")
    assert filled_up(torch.tensor([[2, -1, 0, -1]]), 5).tolist() == [[2, 1, 0, 3]]
    assert overlap(torch.tensor([[0, 3, -1]]), torch.tensor([[3, 1, 2]]), 5) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny:prefill", "tiny:decode"])
def test_tiny_passes(name: str, k31_json: RunJson) -> None:
    code, data = k31_json("check", name)
    assert code == 0, data["first_wrong"]
    assert data["fused"]["lightning_indexer"] == 2
    assert len(data["stages"]) > 50


class Overwritten(torch.nn.Module):
    """A delta rule whose state is written over at the end, and not row by row."""

    def forward(self, q: Any, k: Any, v: Any, g: Any, b: Any, state: Any) -> torch.Tensor:
        decayed = state * g.exp().unsqueeze(-1)
        delta = b.unsqueeze(-1) * (v - torch.einsum("bhk,bhkv->bhv", k, decayed))
        new = decayed + k.unsqueeze(-1) * delta.unsqueeze(-2)
        state.copy_(new)
        return torch.einsum("bhk,bhkv->bhv", q, new)


def test_a_state_that_is_written_over_is_judged_as_the_operator_saw_it() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, generator=generator) for n in (8, 8, 12))
    gate, beta = -torch.rand(2, 3, 8, generator=generator), torch.rand(2, 3, generator=generator)
    entry = k31compile.Entry(
        "over", Overwritten(), (q, k / 8, v, gate, beta, torch.randn(2, 3, 8, 12, generator=generator))
    )
    stages = k31compile.check(entry).stages
    assert any(stage.kind == "operator" and "kda_recurrent" in stage.name for stage in stages)
    assert all(stage.ok for stage in stages), [(stage.name, stage.k31) for stage in stages]
