"""Predicted seconds of K3.1's decode step on one stream, as scheduled, and at least: a model's figures, no measurement.

    python benchmarks/bench_schedule.py [--layers 5] [--target cuda ...] [--json]

The graph is K3.1 at its real sizes on the meta device after the passes, so that an operator of ours is one task. What a
target decomposes has more tasks: `k31 compile full:decode --target ascend-a3 --offline` prints that schedule.
"""

import argparse
import json
import time

from k31compile.backend import captured_graph
from k31compile.cli.entries import shipped_entries
from k31compile.passes.schedule.cost_model import known_targets, load_costs
from k31compile.passes.schedule.graph_tasks import tasks_of
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule
from k31compile.targets.reinplace import reinplace_cache_writes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--target", action="append", choices=known_targets())
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
