"""What a user is told: nothing fused, handed over, options that do not exist, kernels that cannot be built."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from k31compile.report import last_report

OPS = {"codegen": "ops"}


def scores(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.einsum("bthd,bsd->bths", q, k).relu() * w[..., None]).sum(2)


def operands() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in ((2, 7, 3, 10), (2, 23, 10), (2, 7, 3)))


def test_nothing_fused_is_said_loudly_with_the_nearest_miss(caplog: pytest.LogCaptureFixture) -> None:
    def no_relu(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.einsum("bthd,bsd->bths", q, k) * w[..., None]).sum(2).topk(4).indices

    with caplog.at_level(logging.WARNING, logger="k31compile"), torch.no_grad():
        torch.compile(no_relu, backend="k31", options=OPS)(*operands())
    assert "nothing was fused in this graph; nearest miss: lightning_indexer: the relu is missing" in caplog.text
    assert "test_what_is_said.py:" in caplog.text
    assert last_report().near_misses_first()[0].near_miss


def test_a_model_without_anything_of_ours_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="k31compile"), torch.no_grad():
        torch.compile(torch.nn.Linear(3, 4), backend="k31", options=OPS)(torch.ones(2, 3))
    assert "nothing in it resembled a known operator" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codegen": "op"}, "did you mean 'ops'"),
        ({"code_gen": "ops"}, "did you mean 'codegen'"),
        ({"codegen": "tiered", "cache": False}, "needs cache=True"),
        ({"target": "cuda"}, "not built yet"),
        ({"target": "ascend-a3"}, "not compiled for ascend-a3: k31 compiles for inference"),
        ({"fuse": ["mx_quant"]}, "not built yet"),
    ],
)
def test_a_wrong_option_is_refused_by_torch_compile(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        torch.compile(torch.nn.Linear(3, 4), backend="k31", options=options)(torch.ones(2, 3))


def test_strict_makes_a_near_miss_an_error() -> None:
    def squared(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.einsum("bthd,bsd->bths", q, k).relu().square() * w[..., None]).sum(2).topk(4).indices

    with torch.no_grad(), pytest.raises(Exception, match="the relu is squared"):
        torch.compile(squared, backend="k31", options={**OPS, "strict": True})(*operands())


def test_fuse_leaves_out_what_is_not_named() -> None:
    def chosen(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return scores(q, k, w).topk(4).indices

    with torch.no_grad():
        torch.compile(chosen, backend="k31", options={**OPS, "fuse": ["sparse_flash_attention"]})(*operands())
    assert last_report().fused == {}


WITHOUT_COMPILER = """
import torch, k31compile
def f(q, k, w):
    return (torch.einsum("bthd,bsd->bths", q, k).relu() * w[..., None]).sum(2).topk(4).indices
q, k, w = torch.randn(2, 7, 3, 10), torch.randn(2, 23, 10), torch.rand(2, 7, 3)
with torch.no_grad():
    got = torch.compile(f, backend="k31", options={"codegen": "ops"})(q, k, w)
    same = (got == f(q, k, w)).float().mean()
report = k31compile.last_report()
print(report.fused, report.providers["lightning_indexer"]["provider"], report.providers["lightning_indexer"]["why"])
assert same > 0.9
"""


def test_without_a_compiler_the_reference_serves_and_the_report_says_so(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "K31_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "{'lightning_indexer': 1} reference" in done.stdout
    assert "compiler" in done.stdout


def test_a_buffer_keeps_its_identity() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x + self.seen

    model = Counting()
    buffer = model.seen
    compiled = torch.compile(model, backend="k31", options=OPS)
    with torch.no_grad():
        results = [compiled(torch.zeros(3)) for _ in range(3)]
    assert model.seen is buffer
    assert buffer.tolist() == [3.0] * 3
    assert results[-1].tolist() == [3.0] * 3


class FetchedByExpert(torch.nn.Module):
    """Each expert on the tokens that chose it, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, slot = torch.where(indices == i)
            y[row] += expert(x[row]) * weights[row, slot, None]
        return y


class AskedByExpert(FetchedByExpert):
    """The same, experts without tokens skipped."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = indices == i
            if mine.any():
                y += (mine * weights).sum(-1, keepdim=True) * expert(x)
        return y


@pytest.mark.parametrize("kind", [FetchedByExpert, AskedByExpert])
def test_a_loop_that_dynamo_skips_is_told_with_what_to_write(
    kind: type[torch.nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    import k31compile

    arguments = torch.randn(5, 6), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    with caplog.at_level(logging.WARNING, logger="k31compile"):
        report = k31compile.explain(kind(), *arguments)
    (note,) = [note for note in report.notes if f"{kind.__name__}.forward is left uncompiled" in note]
    assert "test_what_is_said.py:" in note
    assert "y = y + share * expert(x)" in note
    assert note in caplog.text
    again = k31compile.explain(torch.nn.Linear(6, 6), arguments[0])
    assert not [note for note in again.notes if "left uncompiled" in note]


class AskedWithoutModules(torch.nn.Module):
    """No module is called, so that no graph is made of any part."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = torch.nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i in range(3):
            mine = indices == i
            if mine.any():
                y += (mine * weights).sum(-1, keepdim=True) * (x @ self.matrices[i])
        return y


def test_what_is_said_of_a_model_stays_with_it(caplog: pytest.LogCaptureFixture) -> None:
    import k31compile
    from k31compile import notes

    arguments = torch.randn(5, 6), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    notes.take_notes()
    torch._dynamo.reset()
    known = len(k31compile.reports())
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="k31compile"):
        torch.compile(AskedWithoutModules(), backend="k31", options={"codegen": "ops"})(*arguments)
        torch.compile(torch.nn.Tanh(), backend="k31", options={"codegen": "ops"})(arguments[0])
    (report,) = k31compile.reports()[known:]
    assert not report.notes
    (note,) = notes.take_notes()
    assert "AskedWithoutModules.forward is left uncompiled" in note
    assert note in caplog.text


def test_notes_for_a_compiler_wait_for_it() -> None:
    from k31compile import notes

    notes.take_notes()
    mine, other = object(), object()
    with notes.telling_for(mine):
        notes.tell("of mine")
        notes.tell("of mine")
    notes.tell("for whoever comes")
    with notes.telling_for(other):
        assert notes.take_notes() == ["for whoever comes"]
    with notes.telling_for(mine):
        assert notes.take_notes() == ["of mine"]
    assert notes.take_notes() == []


def test_a_graph_that_is_asked_for_and_cannot_be_had_says_why() -> None:
    from k31compile.backend import captured_graph
    from k31compile.errors import TraceError

    def written(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        one.add_(1)
        return one.sum() + other.sum()

    whole = torch.zeros(8)
    with torch.no_grad(), pytest.raises(TraceError, match=r"no graph of this call.*share memory and one is written"):
        captured_graph(written, (whole[:6], whole[2:]), {}, "cpu")
