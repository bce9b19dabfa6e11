"""What streams gain on the CPU: a schedule's threads against one thread, each operator on one core.

    python benchmarks/bench_streams.py [--case NAME ...] [--seconds S] [--output FILE]

`ratio` is the median of one stream's wall time / the schedule's, alternating: above 1 the streams are faster. `spread`
is the interquartile range of that over its median. Tasks are scheduled by what they were measured to take on one
stream, and with the seconds that an event between two threads takes here, measured too. Both columns run the same
executor, so what Python adds to each operator is in both; `plain` is the graph as it is, without the executor.
`plain_threads` is what two threads gain on the products of the first case without any executor: what the machine gives.
"""

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.graph_tasks import tasks_of
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule
from k31compile.targets.streams.prepare import prepare_graph
from k31compile.targets.streams.scheduled_module import ScheduledModule

MEASURED_RUNS = 7


@dataclass
class Row:
    suite: str
    name: str
    case: str
    against: str
    ratio: float
    spread: float
    threads: int
    streams: int
    events: int
    predicted: float


def two_chains(size: int, length: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Two chains of products that have nothing in common but their first matrix and the sum of their ends."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        one, other = x, x
        for _ in range(length):
            one, other = one @ weight, other @ weight
        return (one + other,)

    with FakeTensorMode():
        module = make_fx(run)(torch.empty(size, size), torch.empty(size, size))
    return module, [torch.randn(size, size), torch.randn(size, size) / size**0.5]


def decode(name: str) -> tuple[fx.GraphModule, list[Any]]:
    """The decode step of a shipped model after the passes."""
    from k31compile.backend import captured_graph
    from k31compile.cli.entries import shipped_entries

    (entry,) = shipped_entries(name, "decode", "fp32")
    with entry.grad_mode():
        module, inputs = captured_graph(entry.model, entry.args, entry.kwargs, "cpu")
    return prepare_graph(module), list(inputs)


CASES: dict[str, Callable[[], tuple[fx.GraphModule, list[Any]]]] = {
    "two chains of 12 products of 768 x 768": lambda: two_chains(768, 12),
    "two chains of 12 products of 192 x 192": lambda: two_chains(192, 12),
    "tiny decode": lambda: decode("tiny"),
    "mini decode": lambda: decode("mini"),
}


def event_seconds() -> float:
    """From one thread setting an event to another, which waited, going on: the median of many."""
    there, back = threading.Event(), threading.Event()
    rounds = 300

    def answer() -> None:
        for _ in range(rounds):
            there.wait()
            there.clear()
            back.set()

    thread = threading.Thread(target=answer)
    thread.start()
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        there.set()
        back.wait()
        back.clear()
        took.append((time.perf_counter() - start) / 2)
    thread.join()
    return statistics.median(took)


def plain_threads(size: int, length: int, seconds: float) -> float:
    """What two threads gain over one on two chains of products without any executor: what the machine has to give."""
    chains = [torch.randn(size, size) / size**0.5 for _ in range(2)]

    def work(weight: torch.Tensor) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            value = weight
            for _ in range(length):
                value = value @ weight

    def beside() -> None:
        other = threading.Thread(target=work, args=(chains[1],))
        other.start()
        work(chains[0])
        other.join()

    return statistics.median(alternate(beside, lambda: [work(chain) for chain in chains], seconds))


def on_one_stream(graph: TaskGraph, event: float) -> Schedule:
    return schedule_tasks(graph, event, streams=1)


def measured(module: fx.GraphModule, inputs: Sequence[Any], graph: TaskGraph) -> TaskGraph:
    """The tasks with the seconds that each takes on one stream, the executor's part included; every core is alike."""
    begun: list[tuple[str, float]] = []
    run = ScheduledModule(
        module, on_one_stream(graph, 0.0), watch=lambda number, name: begun.append((name, time.perf_counter()))
    )
    seconds: dict[str, list[float]] = {}
    for _ in range(MEASURED_RUNS):
        begun.clear()
        run(*inputs)
        begun.append(("", time.perf_counter()))
        for (name, start), (_, end) in itertools.pairwise(begun):
            seconds.setdefault(name, []).append(end - start)
    run.close()
    nodes = {node.name for node in module.graph.nodes}
    return TaskGraph(
        replace(task, engine="vector", seconds=statistics.median(seconds[task.name]) if task.name in nodes else 0.0)
        for task in graph.tasks
    )


def alternate(ours: Callable[[], object], other: Callable[[], object], seconds: float) -> list[float]:
    """other / ours in wall time, alternating, at least nine times."""
    ours(), other()
    ratios: list[float] = []
    end = time.monotonic() + seconds
    while len(ratios) < 9 or time.monotonic() < end:
        start = time.perf_counter()
        ours()
        middle = time.perf_counter()
        other()
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return ratios


def measure(name: str, event: float, seconds: float) -> list[Row]:
    module, inputs = CASES[name]()
    graph = measured(module, inputs, TaskGraph(tasks_of(module, load_costs("cuda"))))
    schedule = schedule_tasks(graph, event, streams=2)
    verify_schedule(graph, schedule)
    streams = ScheduledModule(module, schedule)
    alone = ScheduledModule(module, on_one_stream(graph, event))
    rows = []
    for against, other in (("one stream", alone), ("plain", module)):
        ratios = alternate(lambda: streams(*inputs), lambda other=other: other(*inputs), seconds)
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            Row(
                "streams",
                "overlap",
                name,
                against,
                round(middle, 3),
                round((high - low) / middle, 3),
                torch.get_num_threads(),
                len(schedule.streams),
                len(schedule.events),
                round(schedule.serial / schedule.predicted, 3),
            )
        )
        print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", action="append", choices=CASES, help="only these; all of them unless given")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each pair alternates")
    parser.add_argument("--output", type=Path, help="write the JSON here instead of to standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    event = event_seconds()
    plain = round(plain_threads(768, 12, options.seconds), 3)
    with torch.no_grad():
        rows = [row for name in options.case or CASES for row in measure(name, event, options.seconds)]
    report = {
        "event_seconds": event,
        "plain_threads": plain,
        "rows": [asdict(row) for row in rows],
        "versions": {"torch": torch.__version__},
    }
    text = json.dumps(report, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
