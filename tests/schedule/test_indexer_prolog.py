"""The three streams of the indexer's prolog come out of the general method, with their joins at the right end."""

import itertools

import pytest

from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import Task, TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule

EVENT = 0.1

KEYS = ("wk", "k_norm", "cache_write")
QUERIES = ("wq_b", "q_quant")
WEIGHTS = ("weights_proj",)


def prolog(wk, k_norm, cache_write, wq_b, q_quant, weights_proj, unit=1.0):
    """The indexer behind what computes its operands, and the attention behind it; hidden and qr are there before."""
    return TaskGraph(
        [
            Task("mla_prolog", 3.0 * unit, "cube"),
            Task("wk", wk, "cube", inputs=("mla_prolog",)),
            Task("k_norm", k_norm, "vector", inputs=("wk",)),
            Task("cache_write", cache_write, "memory", writes=("keys",), inputs=("k_norm",)),
            Task("wq_b", wq_b, "cube", inputs=("mla_prolog",)),
            Task("q_quant", q_quant, "vector", inputs=("wq_b",)),
            Task("weights_proj", weights_proj, "cube", inputs=("mla_prolog",)),
            Task("indexer", 6.0 * unit, "vector", reads=("keys",), inputs=("q_quant", "weights_proj")),
            Task("attention", 8.0 * unit, "vector", inputs=("indexer",)),
        ]
    )


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param((1.0, 4.5, 5.0, 4.0, 5.0, 1.0), id="keys take longest"),
        pytest.param((1.0, 4.5, 4.5, 4.0, 5.5, 1.0), id="queries take longest"),
        pytest.param((2.0, 3.5, 4.0, 3.0, 5.0, 2.0), id="long weights"),
    ],
)
def test_three_streams_fall_out(seconds):
    graph = prolog(*seconds)
    schedule = schedule_tasks(graph, EVENT, price=0.0)
    verify_schedule(graph, schedule)
    parts = KEYS[1:], QUERIES, WEIGHTS
    beside = {tuple(name for name in names if name in sum(parts, ())) for names in schedule.streams}
    # The products take turns at the cube, so wk may stand in front of its own branch or, for one event less, of wq_b.
    assert beside == set(parts)
    wk_stream = next(names for names in schedule.streams if "wk" in names)
    assert wk_stream[wk_stream.index("wk") + 1] in ("k_norm", "wq_b")
    assert set(schedule.streams[0]) >= {"indexer", "attention"}
    joins = {after for after, before in schedule.events if before == "indexer"}
    last = {names[-1] for names in schedule.streams[1:]}
    assert joins == last <= {"cache_write", "q_quant", "weights_proj"}
    assert schedule.predicted < schedule_tasks(graph, EVENT, streams=2, price=0.0).predicted < schedule.serial


def test_the_products_do_not_fight_for_the_cube():
    graph = prolog(1.0, 4.5, 5.0, 4.0, 5.0, 1.0)
    times = schedule_tasks(graph, EVENT).times
    spans = sorted(times[name] for name in ("wk", "wq_b", "weights_proj"))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1] == times["weights_proj"]


def test_a_stream_that_gains_nothing_is_not_used():
    """Where the query takes long, the weights fit behind the keys, and no third stream could be any faster."""
    graph = prolog(1.0, 1.0, 1.0, 9.0, 5.0, 1.0)
    schedule = schedule_tasks(graph, EVENT)
    verify_schedule(graph, schedule)
    assert len(schedule.streams) == 2


@pytest.mark.parametrize("target", ["ascend-a3", "ascend-950", "cuda"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_with_the_figures_of_a_target_it_is_no_slower_than_one_stream(target, tokens):
    costs = load_costs(target)

    def product(rows, columns):
        moved = 2 * (rows * columns + tokens * (rows + columns))
        return costs.seconds_of(2 * tokens * rows * columns, moved, "cube")

    def elementwise(width):
        return costs.seconds_of(10 * tokens * width, 4 * tokens * width, "vector")

    graph = prolog(
        *(product(7168, 128), elementwise(128), elementwise(128)),
        *(product(1536, 8192), elementwise(8192)),
        product(7168, 64),
        unit=1e-6,
    )
    schedule = schedule_tasks(graph, costs.event.value)
    verify_schedule(graph, schedule)
    print(target, tokens, schedule.streams, schedule.events, schedule.serial, schedule.predicted, graph.bound)
    assert schedule.predicted <= schedule.serial
