"""Predicted seconds of K3.1's decode step on one stream, as scheduled, and at least: a model's figures, no measurement.

    python benchmarks/bench_schedule.py [--layers 5] [--target cuda ...] [--json]
    python benchmarks/bench_schedule.py --sizes 1000 5000 20000 50000     # CPU seconds of the scheduler itself

The graph is K3.1 at its real sizes on the meta device after the passes, so that an operator of ours is one task. What a
target decomposes has more tasks: `k31 compile full:decode --target ascend-a3 --offline` prints that schedule.

Of each size two graphs are drawn, always the same: "woven" ones, in which a task waits for up to three of the 60 in
front of it, so that no place cuts them in two, and "layered" ones, in which layers of four branches follow each other.
"""

import argparse
import json
import random
import time

from k31compile.backend import captured_graph
from k31compile.cli.entries import shipped_entries
from k31compile.passes.schedule.cost_model import known_targets, load_costs
from k31compile.passes.schedule.graph_tasks import tasks_of
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import Task, TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule
from k31compile.targets.reinplace import reinplace_cache_writes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--target", action="append", choices=known_targets())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="TASKS")
    args = parser.parse_args()
    if args.sizes:
        print_sizes(args.sizes)
        return
    (entry,) = shipped_entries("full", "decode", "bf16", args.layers)
    with entry.grad_mode():
        module, _ = captured_graph(entry.model, entry.args, entry.kwargs, "cpu")
    reinplace_cache_writes(module)
    rows = [row(module, target) for target in args.target or known_targets()]
    if args.json:
        print(json.dumps({"layers": args.layers, "rows": rows}, indent=1))
        return
    print(f"K3.1, {args.layers} layers, decode, one token; predictions in microseconds")
    print(
        f"{'target':12}{'tasks':>6}{'serial':>9}{'scheduled':>11}{'bound':>9}{'over':>7}{'streams':>9}{'events':>8}{'s':>6}"
    )
    for one in rows:
        times = "".join(
            f"{one[key] * 1e6:{width}.0f}" for key, width in (("serial", 9), ("scheduled", 11), ("bound", 9))
        )
        over = one["scheduled"] / one["bound"] - 1
        print(
            f"{one['target']:12}{one['tasks']:6}{times}{over:7.1%}{one['streams']:9}{one['events']:8}{one['seconds']:6.1f}"
        )


def row(module, target):
    costs = load_costs(target)
    graph = TaskGraph(tasks_of(module, costs))
    begun = time.perf_counter()
    schedule = schedule_tasks(graph, costs.event.value)
    seconds = time.perf_counter() - begun
    verify_schedule(graph, schedule)
    return {
        "target": target, "tasks": len(graph.tasks), "serial": schedule.serial, "scheduled": schedule.predicted,
        "critical_path": schedule.critical_path, "bound": graph.bound, "streams": len(schedule.streams),
        "events": len(schedule.events), "seconds": seconds,
    }  # fmt: skip


def print_sizes(sizes):
    print("drawn graphs, an event of 1.5 us; CPU seconds of the scheduler and of the verifier")
    print(f"{'graph':9}{'tasks':>7}{'schedule':>10}{'verify':>8}{'over the bound':>16}{'events':>8}{'streams':>9}")
    for kind in (woven, layered):
        for size in sizes:
            graph = TaskGraph(kind(size))
            begun = time.process_time()
            schedule = schedule_tasks(graph, 1.5e-6)
            scheduled = time.process_time()
            verify_schedule(graph, schedule)
            verified = time.process_time()
            over = schedule.predicted / graph.bound - 1
            seconds = f"{scheduled - begun:10.1f}{verified - scheduled:8.1f}"
            counts = f"{len(schedule.events):8}{len(schedule.streams):9}"
            print(f"{kind.__name__:9}{size:7}{seconds}{over:16.1%}{counts}", flush=True)


def woven(count):
    draw = random.Random(0)
    tasks = []
    for place in range(count):
        inputs = {f"t{draw.randint(max(0, place - 60), place - 1)}" for _ in range(draw.randint(0, 3)) if place}
        engine = draw.choice(["cube", "vector", "vector", "memory"])
        tasks.append(Task(f"t{place}", draw.uniform(1, 30) * 1e-6, engine, inputs=tuple(sorted(inputs))))
    return tasks


def layered(count):
    """Layers of four branches of 3 to 12 tasks between a task that all wait for and one that waits for all."""
    draw = random.Random(0)
    tasks = [Task("t0", 3e-6, "vector")]

    def add(*inputs):
        if len(tasks) < count:
            engine = draw.choice(["cube", "vector", "vector", "memory"])
            seconds = draw.choice([3e-6, 3e-6, draw.uniform(3, 30) * 1e-6])
            tasks.append(Task(f"t{len(tasks)}", seconds, engine, inputs=tuple(dict.fromkeys(inputs))))
        return tasks[-1].name

    while len(tasks) < count:
        first = add(tasks[-1].name)
        ends = []
        for _ in range(4):
            ends.append(first)
            for _ in range(draw.randint(3, 12)):
                ends[-1] = add(ends[-1])
        add(*ends)
    return tasks


if __name__ == "__main__":
    main()
