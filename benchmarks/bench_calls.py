"""What a call of an operator costs where there is next to nothing to compute: with and without Python.

    python benchmarks/bench_calls.py [--library] [--seconds S] [--output FILE]

Microseconds of CPU time of one call on one thread, each operator at the sizes of a decode step of `tiny` or below, both
ways in turns: `direct` is `torch.ops.k31.NAME.default(...)`, served by the built library; `python` is what serves where
it has not taken over (checks and ctypes), without torch's way there. `spread` is the distance between the quartiles of
the rounds' ratios over their median. With `--library`, calls in a library that AOTInductor builds of 64 of them. Both
ways must give the same bits, and the library must have served its calls, or the command ends with an error.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import k31compile.kernels as kernels
from k31compile.kernels.cpu import loader
from k31compile.kernels.cpu.direct_calls import count_calls
from k31compile.kernels.in_place import IN_PLACE

Call = tuple[tuple[Any, ...], dict[str, Any]]
PER_ROUND = 200
CALLS = 32  # of either operator in the library


def draw_calls() -> dict[str, Call]:
    """A call of each operator: one token, hidden size 64, a history of 64."""
    torch.manual_seed(0)
    heads, width, hidden, history, experts = 2, 16, 64, 64, 4
    query, key = torch.randn(1, 1, 4, width), torch.randn(1, history, 1, width)
    channels = 3 * heads * width
    rows = [torch.randn(1, 1, heads, width) for _ in range(3)]
    gate, beta, state = -torch.rand(1, 1, heads, width), torch.rand(1, 1, heads), torch.randn(1, heads, width, width)
    bank, queries, row = torch.randn(1, 2, hidden), torch.randn(6, hidden), torch.randn(1, hidden)
    maximum, total, mixture = kernels.attn_res_prepare_reference(bank, queries, eps=1e-6)
    lists = [[torch.randn(32, hidden) for _ in range(experts)] for _ in range(2)]
    lists.append([torch.randn(hidden, 32) for _ in range(experts)])
    conv, kept, weight = torch.randn(1, 1, channels), torch.randn(1, 3, channels), torch.randn(channels, 4)
    lengths, chosen = torch.tensor([history]), torch.arange(8, dtype=torch.int32).view(1, 1, 1, 8)
    mega = (rows[0], torch.randn(heads), torch.randn(heads, width), beta, state, rows[1], torch.randn(width))
    return {
        "lightning_indexer": (
            (query, key, torch.randn(1, 1, 4)),
            {"actual_seq_lengths_key": lengths, "sparse_count": 8},
        ),
        "sparse_flash_attention": (
            (query, key, key, chosen, 0.25),
            {"actual_seq_lengths_kv": lengths},
        ),
        "kda_recurrent": ((*rows, gate, beta, state), {}),
        "kda_recurrent_": ((*rows, gate, beta, state.clone()), {}),
        "kda_chunk": ((*rows, gate, beta, state), {}),
        "gated_delta_recurrent": ((*rows, gate[..., 0], beta, state), {}),
        "gated_delta_chunk": ((*rows, gate[..., 0], beta, state), {}),
        "attn_res_prepare": ((bank, queries), {"eps": 1e-6}),
        "attn_res_update": (
            (row, row, maximum[:, 0], total[:, 0], mixture[:, 0], queries[0]),
            {"eps": 1e-6, "norm_weight": row[0]},
        ),
        "short_conv": ((conv, weight), {"state": kept}),
        "gated_rms_norm": ((rows[0], rows[1], torch.randn(width)), {"eps": 1e-5}),
        "mega_kda": (([conv], [weight], [kept], *mega), {"norm_eps": 1e-5, "lower_bound": -5.0}),
        "mega_kda_": (
            ([conv], [weight], [kept], *mega[:4], state.clone(), *mega[5:]),
            {"norm_eps": 1e-5, "lower_bound": -5.0},
        ),
        "moe_gating_top_k": ((torch.randn(1, experts), 2), {}),
        "grouped_experts": ((row, torch.tensor([[0, 2]]), torch.rand(1, 2), *lists), {}),
    }


def measure(call: Callable[[], object]) -> float:
    """Microseconds of CPU time of one of a round's calls."""
    start = time.thread_time_ns()
    for _ in range(PER_ROUND):
        call()
    return (time.thread_time_ns() - start) / PER_ROUND / 1e3


def compare(name: str, call: Call, seconds: float) -> dict[str, Any]:
    """One operator both ways, in turns."""
    arguments, options = call
    overload = getattr(torch.ops.k31, name).default
    detour = IN_PLACE[name] if name in IN_PLACE else kernels.OPERATORS[name].run
    # Each way on copies of its own, since a state may be written.
    copies = [pytree.tree_map_only(torch.Tensor, torch.clone, arguments) for _ in range(2)]
    given = [run(*copy, **options) for run, copy in zip((overload, detour), copies, strict=True)]
    check_alike(name, *given)
    check_alike(name, *([x for x in pytree.tree_leaves(copy) if isinstance(x, torch.Tensor)] for copy in copies))
    times: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while len(times) < 5 or time.monotonic() < end:
        direct = measure(lambda: overload(*arguments, **options))
        times.append((direct, measure(lambda: detour(*arguments, **options))))
    counts = count_calls(name)
    if counts is None or counts[0] < len(times) * PER_ROUND:
        raise SystemExit(f"{name}: the library did not serve these calls ({counts})")
    ratios = statistics.quantiles([python / direct for direct, python in times], n=4)
    direct, python = (statistics.median(column) for column in zip(*times, strict=True))
    return {"name": name, "direct": direct, "python": python, "spread": (ratios[2] - ratios[0]) / ratios[1]}


def check_alike(name: str, direct: Any, python: Any) -> None:
    """End where the two ways differ in a bit."""
    pairs = zip(*((given,) if isinstance(given, torch.Tensor) else given for given in (direct, python)), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        raise SystemExit(f"{name}: the results with and without Python differ")


def measure_library(calls: dict[str, Call], seconds: float) -> dict[str, Any]:
    """A call inside of a library: as many of kda_recurrent as of attn_res_update, one after the other."""
    from k31compile.graph.trace import trace_functional
    from k31compile.targets.native.build import build_native
    from k31compile.targets.native.load import load_native

    arguments = (*calls["kda_recurrent"][0], *(x.clone() for x in calls["attn_res_update"][0]))

    def chain(
        q: Any, k: Any, v: Any, g: Any, b: Any, state: Any, p: Any, delta: Any, *prepared: Any
    ) -> tuple[Any, ...]:
        for _ in range(CALLS):
            v, state = torch.ops.k31.kda_recurrent(q, k, v, g, b, state)
            p, delta = torch.ops.k31.attn_res_update(p, delta, *prepared, eps=1e-6)
        return v, state, p, delta

    loaded: list[Callable[..., Any]] = []
    with tempfile.TemporaryDirectory() as folder:

        def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
            plan = build_native(trace_functional(module, inputs), inputs, Path(folder))
            loaded.append(load_native(Path(folder), plan))
            return loaded[0]

        given = torch.compile(chain, backend=backend, fullgraph=True, dynamic=False)(*arguments)
    check_alike("the library", given, chain(*arguments))
    rounds: list[float] = []
    end = time.monotonic() + seconds
    while len(rounds) < 5 or time.monotonic() < end:
        rounds.append(measure(lambda: loaded[0](*arguments)) / (2 * CALLS))
    quarters = statistics.quantiles(rounds, n=4)
    return {"name": "in a library, each", "direct": quarters[1], "spread": (quarters[2] - quarters[0]) / quarters[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", action="store_true", help="also calls in a library; builds it first")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--output", type=Path, help="also write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    usable, why = loader.available()
    if not usable or count_calls("kda_recurrent") is None:
        sys.exit(f"the library does not serve calls here: {why}")
    calls, rows = draw_calls(), []
    with torch.no_grad():
        for name, call in calls.items():
            rows.append(compare(name, call, options.seconds))
        if options.library:
            rows.append(measure_library(calls, options.seconds))
    for row in rows:
        python = f"{row['python']:8.1f}" if "python" in row else " " * 8
        print(f"{row['name']:24} direct {row['direct']:6.2f} us  python {python} us  spread {row['spread']:.2f}")
    if options.output:
        options.output.write_text(json.dumps({"rows": rows, "torch": torch.__version__}, indent=1))


if __name__ == "__main__":
    main()
