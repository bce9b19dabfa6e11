"""The cache between processes, whole: warm starts, many at once, weights that changed, parameters that moved."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import k31compile

MODEL = """
    import json, sys, time
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(size, 2 * size), nn.Linear(2 * size, size), nn.LayerNorm(size)
        def forward(self, x):
            return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self, layers, size=16):
            super().__init__()
            self.embed = nn.Embedding(32, size)
            self.layers = nn.ModuleList([Layer(size) for _ in range(layers)])
        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return x.mean(1)

    def build(layers, seed=0):
        torch.manual_seed(seed)
        return Model(layers).eval()
"""

RUN = """
    import json, sys, time, warnings
    import torch
    from model import build
    begin = time.perf_counter()
    layers, seed, ids = json.loads(sys.argv[1])
    model = build(layers, seed)
    with torch.no_grad():
        got = torch.compile(model, backend="k31", options={"cache": sys.argv[2]})(torch.tensor([ids]))
        seconds = time.perf_counter() - begin
        expected = model(torch.tensor([ids]))
    import k31compile
    (report,) = k31compile.reports()
    error = float((got - expected).abs().max())
    print(json.dumps({"hit": report.cache["hit"], "why": report.cache["why"], "error": error, "seconds": seconds,
                      "phases": report.phases, "built": "torch._inductor.compile_fx" in sys.modules}))
"""

IDS = [1, 2, 3, 4, 1, 2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "run.py").write_text(textwrap.dedent(RUN))
    return tmp_path


def start(folder: Path, layers: int = 2, seed: int = 0, ids: list[int] = IDS, **environment: str) -> Any:
    command = [sys.executable, "run.py", json.dumps([layers, seed, ids]), str(folder / "cache")]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.Popen(command, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: Any) -> dict[str, Any]:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    told: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    assert told["error"] < 1e-5
    return told


def test_another_checkpoint_and_other_inputs_are_a_hit_with_their_own_results(folder: Path) -> None:
    """Row D13: weights are inputs, so nothing that a sample did not touch can be stale."""
    assert not result(start(folder))["hit"]
    other = result(start(folder, seed=1, ids=[7, 9, 30, 31, 0, 5]))
    assert other["hit"]
    assert not other["built"]


@pytest.mark.slow
def test_weights_changed_in_place_are_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    embed, experts = nn.Embedding(16, 8), nn.Parameter(torch.randn(6, 8, 8))

    def model(ids: torch.Tensor) -> torch.Tensor:
        x = embed(ids)
        return torch.einsum("td,tde->te", x, experts[ids % 6])

    first, second = torch.tensor([0, 1, 2]), torch.tensor([7, 5, 11])
    for _ in range(2):
        torch._dynamo.reset()
        run = torch.compile(model, backend="k31", options={"cache": tmp_path})
        with torch.no_grad():
            torch.testing.assert_close(run(first), model(first))
            experts[5].copy_(torch.randn(8, 8))
            embed.weight[7].fill_(3.0)
            torch.testing.assert_close(run(second), model(second))
            embed.load_state_dict({"weight": torch.randn(16, 8)})
            torch.testing.assert_close(run(second), model(second))
    assert k31compile.last_report().cache["hit"]


class Shell(nn.Module):
    """A Linear with a low-rank part around it, as adapters are added: its parameters have other names."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


@pytest.mark.slow
def test_a_wrapped_layer_is_another_graph(tmp_path: Path) -> None:
    """Row D3: an adapter or a parametrization around one Linear is a miss with the right result."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))

    def run(model: nn.Module) -> bool:
        torch._dynamo.reset()
        with torch.no_grad():
            got = torch.compile(model, backend="k31", options={"cache": tmp_path})(x)
            torch.testing.assert_close(got, model(x))
        return bool(k31compile.last_report().cache["hit"])

    def stack() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)).eval()

    plain, adapted, changed = stack(), stack(), stack()
    adapted[2] = Shell(adapted[2])
    nn.utils.parametrize.register_parametrization(changed[0], "weight", Halved())
    assert [run(model) for model in (plain, adapted, changed)] == [False, False, False]
    assert [run(model) for model in (plain, adapted, changed)] == [True, True, True]


@pytest.mark.slow
def test_eight_processes_on_an_empty_cache(folder: Path) -> None:
    """Row D6, three times over: all results right, one entry each time, nothing left behind."""
    for seed in range(3):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        processes = [start(folder, layers=1, seed=seed) for _ in range(8)]
        for process in processes:
            result(process)
        entries = list((folder / "cache" / "entries").iterdir())
        assert len(entries) == 1
        assert {path.name for path in entries[0].iterdir()} == {
            "manifest.json", "signature", "graph.txt", "library.so", "library.json",
        }  # fmt: skip
        assert not list((folder / "cache").rglob("*.tmp*"))
        assert result(start(folder, layers=1))["hit"]


@pytest.mark.slow
def test_a_warm_start_of_twelve_layers_takes_a_part_of_a_cold_one(folder: Path) -> None:
    """Row D10: passes and code generation are not run, their times are told, and most of the wait is gone."""
    cold = result(start(folder, layers=12))
    warm = min((result(start(folder, layers=12)) for _ in range(2)), key=lambda told: told["seconds"])
    assert set(cold["phases"]) >= {"trace", "passes", "codegen"}
    assert set(warm["phases"]) & {"trace", "passes", "codegen"} == set()
    assert not warm["built"]
    assert warm["seconds"] <= 0.35 * cold["seconds"]
