"""Whole models and compiles: processes for each variant, played by a script whose times are known."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from k31compile.bench.compile_runs import run_compiles
from k31compile.bench.goals import Bound, Goals
from k31compile.bench.growth import LONG, SHORT, indexers, judge_growth
from k31compile.bench.measure import Settings
from k31compile.bench.model_runs import Place, run_models
from k31compile.bench.models.case import ModelCase
from k31compile.bench.models.mini import bytes_of_a_step
from k31compile.bench.models.products import weight_products
from k31compile.bench.rows import Row
from k31compile.model import K31Config, K31ForCausalLM

PLAYED = """
import json, os, sys, time
from k31compile.bench.worker import serve

plan, state = json.loads(sys.argv[1]), {}

def open_(task):
    state.update(plan[task["variant"]])
    if "dies" in state:
        print("out of memory", file=sys.stderr)
        os._exit(9)
    if "sleeps" in state:
        time.sleep(60)
    found = {"first_seconds": 1.0, "first_cpu_seconds": 2.0, "resident_peak": 1000, "wrong": "", "fused": {}}
    return {**found, **state, "variant": task["variant"], "pid": os.getpid()}

serve({
    "open": open_,
    "had": lambda task: state.get("had", 1.0),
    "sample": lambda task: state["takes"],
    "extra": lambda task: state.get("extra"),
    "part": lambda task: None,
    "floor": lambda task: 5e5,
})
"""
EAGER, OURS, INDUCTOR = {"takes": 4e6, "extra": 80}, {"takes": 1e6, "extra": 20}, {"takes": 2e6, "extra": 40}


def case(has_roof: bool = False) -> ModelCase:
    held = Goals({"inductor": Bound(3.0, 1.5)}, extra_bytes=None, memory_ratio=3.0)
    make = lambda: pytest.fail("made in the worker")  # noqa: E731
    return ModelCase("mini", "decode", make=make, tokens=8, goals=held, roof=make if has_roof else None)


@pytest.fixture
def measured() -> Callable[..., dict[str, Row]]:
    """Return a function that measures a case whose variants behave as it is told; rows by opponent."""

    def run(limit: float = 60.0, has_roof: bool = False, **plan: dict[str, Any]) -> dict[str, Row]:
        place = Place(
            ["-c", PLAYED, json.dumps({"eager": EAGER, "k31": OURS, "inductor": INDUCTOR, **plan})], "", limit
        )
        rows = run_models([case(has_roof)], Settings(("inductor", "eager"), seconds=0.0), place, lambda name: None)
        return {row.against: row for row in rows}

    return run


def test_variants_sample_in_processes_of_their_own(measured) -> None:
    rows = measured()
    assert {name: row.ratio for name, row in rows.items()} == {"inductor": 2.0, "eager": 4.0}
    row = rows["inductor"]
    assert (row.seconds, row.other_seconds, row.tokens, row.rounds) == (1e-3, 2e-3, 8, 5)
    assert (row.goal, row.must, row.verdict) == (3.0, 1.5, "floor")
    assert (row.peak_extra_bytes, row.other_peak_extra_bytes, row.memory_verdict) == (20, 40, "below")
    assert rows["eager"].memory_verdict == "goal"


def test_the_share_of_what_a_case_cannot_do_without_is_told(measured) -> None:
    rows = measured(has_roof=True)  # 0.5 ms, of 1 ms that ours takes
    assert {row.roof for row in rows.values()} == {0.5}
    assert {name: row.details["at_most"] for name, row in rows.items()} == {"inductor": 4.0, "eager": 8.0}
    assert all("at_most" not in row.details and row.roof is None for row in measured().values())


def test_products_of_a_prompt() -> None:
    model = nn.Module()
    model.up, model.norm = nn.Linear(3, 5), nn.LayerNorm(3)
    model.experts = nn.Module()
    model.experts.down_proj = nn.Parameter(torch.zeros(7, 2, 11))
    assert weight_products(model, 3) == 2 * (3 * 5 + 3 * 2 * 11)


def test_a_step_reads_weights_keys_latents_and_states() -> None:
    config = K31Config.tiny()
    one, two = (bytes_of_a_step(config, torch.float32, 1, history) for history in (1000, 1001))
    layers = sum(map(config.has_indexer, range(config.num_hidden_layers)))
    assert two - one == layers * config.index_head_dim * 4
    assert bytes_of_a_step(config, torch.bfloat16, 1, 1001) - bytes_of_a_step(config, torch.bfloat16, 1, 1000) == (
        layers * config.index_head_dim * 2
    )
    # of very many tokens some pick each expert: what is left for each token are its caches
    many, more = (bytes_of_a_step(config, torch.float32, batch, 0) for batch in (10_000, 10_001))
    states = more - many
    held = sum(p.numel() * 4 for p in K31ForCausalLM(config).to_serving_dtype(torch.float32).parameters())
    embedding = config.vocab_size * config.hidden_size * 4
    assert many - 10_000 * states == pytest.approx(held - embedding, rel=1e-6)
    kda = config.num_hidden_layers - len(config.full_attention_layers)
    assert states == pytest.approx(kda * config.kda_num_heads * config.kda_key_dim * config.kda_value_dim * 8, rel=1e-6)


def test_wall_times_mean_nothing_while_others_work(measured) -> None:
    rows = measured(k31={**OURS, "had": 0.5})
    assert all(row.ratio is None and row.noisy for row in rows.values())
    assert rows["inductor"].verdict == "noisy"
    assert rows["inductor"].details["refused"].startswith("others were at work: 50%")


def test_a_wrong_model_is_an_error_and_never_timed(measured) -> None:
    rows = measured(k31={**OURS, "wrong": "result 0 is far away"})
    assert all(row.error == "k31: result 0 is far away" and row.ratio is None for row in rows.values())


def test_a_wrong_opponent_is_an_error_of_its_row_alone(measured) -> None:
    rows = measured(inductor={**INDUCTOR, "wrong": "result 0 is far away"})
    assert (rows["inductor"].error, rows["inductor"].ratio) == ("inductor: result 0 is far away", None)
    assert (rows["eager"].error, rows["eager"].ratio) == ("", 4.0)


def test_an_opponent_that_dies_or_takes_too_long_is_left_out(measured) -> None:
    rows = measured(inductor={"dies": True})
    assert rows["inductor"].skipped == "inductor: the process ended with 9: out of memory"
    assert (rows["inductor"].error, rows["eager"].ratio) == ("", 4.0)
    rows = measured(limit=8.0, inductor={"sleeps": True})
    assert rows["inductor"].skipped == "inductor: stopped after 8 s"
    assert rows["eager"].ratio == 4.0


def test_ours_that_dies_is_an_error(measured) -> None:
    rows = measured(k31={"dies": True})
    assert {row.error for row in rows.values()} == {"k31: the process ended with 9: out of memory"}


def test_a_missing_package_is_said_and_is_no_error(measured) -> None:
    rows = measured(eager={"skipped": "transformers is not installed"})
    assert {(row.error, row.skipped) for row in rows.values()} == {("", "transformers is not installed")}


@pytest.mark.parametrize("repeats", [1, 3])
def test_compiles_are_measured_cold_and_warm(repeats: int) -> None:
    plan = {
        "eager": EAGER,
        "k31": {"first_seconds": 10.0, "resident_peak": 500},
        "inductor": {"first_seconds": 30.0, "resident_peak": 900, "first_cpu_seconds": 40.0},
    }
    place = Place(["-c", PLAYED, json.dumps(plan)])
    settings = Settings(("inductor", "eager"), seconds=0.0)
    rows = run_compiles([case()], settings, place, lambda name: None, repeats)
    assert [(row.case, row.against) for row in rows] == [("decode, cold", "inductor"), ("decode, warm", "inductor")]
    for row in rows:
        assert (row.suite, row.ratio, row.seconds, row.other_seconds) == ("compile", 3.0, 10.0, 30.0)
        assert (row.peak_extra_bytes, row.other_peak_extra_bytes) == (500, 900)
        assert row.details["other_cpu_seconds"] == 40.0
        assert (row.details["runs"], row.spread) == (repeats, None if repeats == 1 else 0.0)


def test_a_wrong_compile_is_an_error() -> None:
    plan = {"eager": EAGER, "k31": {"wrong": "result 0 is far away"}, "inductor": {"first_seconds": 3.0}}
    place = Place(["-c", PLAYED, json.dumps(plan)])
    rows = run_compiles([case()], Settings(("inductor",), seconds=0.0), place, lambda name: None, 1)
    assert rows[0].error == "k31: result 0 is far away"
    assert all(row.ratio is None for row in rows)


@pytest.mark.parametrize(("long", "growth", "verdict"), [(5e-3, 1.0, "goal"), (6e-3, 2.0, "below")])
def test_growth_leaves_the_indexers_out(long: float, growth: float, verdict: str) -> None:
    def row(series: str, size: int, seconds: float | None, part: float) -> Row:
        made = Row("models", "mini", f"S={size}", "inductor", 1, series=series, size=size, seconds=seconds)
        made.details["part_seconds"] = part
        return made

    rows = [row("a", SHORT, 2e-3, 1e-3), row("a", 16384, 3e-3, 2e-3), row("a", LONG, long, 4e-3)]
    others = [row("b", LONG, 1e-3, 1e-4), row("c", SHORT, None, 1e-3), row("c", LONG, 1e-3, 1e-3)]
    judge_growth([*rows, *others])
    assert rows[2].details["growth"] == pytest.approx(growth)
    assert rows[2].growth_verdict == verdict
    assert all(one.growth_verdict is None for one in [*rows[:2], *others])


def test_every_indexer_of_a_step_is_called_once() -> None:
    results = indexers(K31Config.tiny(), torch.float32, 2, 64)()
    assert [tuple(one.shape) for one in results] == [(2, 1, 1, 16)] * 2
