"""What compiling costs, side by side: k31 and Inductor, each in a process of its own with empty caches.

    python benchmarks/bench_compile.py [--case NAME ...] [--repeats N] [--output FILE]

`first` is the wall time from a built model to its first result, `cpu` the CPU seconds of the process and of all its
children until then (a compiler that runs beside counts), `passes` the CPU seconds of our passes with all their
confirmations, all in medians over the repeats, which alternate the variants. `x Inductor` is Inductor's first / this
one's: above 1 is faster. The library of our C++ kernels is built before: it is made once for an installation.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from k31compile.bench.fresh import cpu_seconds, empty_caches, run_elsewhere

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def kimi_layers(kinds: Sequence[str], hidden: int, head: int, length: int) -> Callable[[], Call]:
    """transformers' kimi_linear, unmodified: layers of these kinds, the first dense, a prompt of `length` tokens."""

    def make() -> Call:
        import transformers

        config = transformers.KimiLinearConfig(
            vocab_size=199, hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=32,
            num_hidden_layers=len(kinds), num_attention_heads=4, num_key_value_heads=4, num_local_experts=8,
            num_experts_per_tok=2, layer_types=list(kinds), linear_head_dim=head, linear_num_heads=4, kv_lora_rank=36,
            qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            mlp_layer_types=["dense"] * 2 if len(kinds) == 2 else ["dense"] + ["sparse"] * (len(kinds) - 1),
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.KimiLinearForCausalLM(config).eval()
        return model, (torch.randint(3, 199, (1, length)),), {"use_cache": False}

    return make


def deep_kimi(layers: int) -> Callable[[], Call]:
    """As many layers of the width of `tiny`, every fourth one of attention, each with weights of its own."""
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
    return kimi_layers(kinds, 64, 16, 64)


def deep_k31(layers: int) -> Callable[[], Call]:
    """A decode step of as many of K3.1's own layers at the width of `tiny`, every fourth one of attention."""

    def make() -> Call:
        from k31compile.model import CONFIGS, Caches, K31ForCausalLM

        config = CONFIGS["tiny"]().replace(
            num_hidden_layers=layers, full_attention_layers=(*range(4, layers, 4), layers), attn_res_block_size=12
        )
        caches = Caches.allocate(config, 1, 64)
        return K31ForCausalLM(config).eval(), (torch.zeros(1, 1, dtype=torch.int64), caches, torch.tensor([20])), {}

    return make


def shipped(name: str) -> Callable[[], Call]:
    """An entry of the command line."""

    def make() -> Call:
        from k31compile.cli.target import load_entries

        (entry,) = load_entries(name)
        return entry.model, entry.args, dict(entry.kwargs)

    return make


CASES: dict[str, tuple[Callable[[], Call], tuple[str, ...]]] = {
    "kimi_linear, 2 KDA layers, T=256": (
        kimi_layers(["linear_attention"] * 2, 256, 64, 256),
        ("k31 ops", "k31 built", "inductor"),
    ),
    "pico prefill": (shipped("pico:prefill"), ("k31 ops", "k31 built", "inductor")),
    "pico decode": (shipped("pico:decode"), ("k31 ops", "k31 built", "inductor")),
    "kimi_linear, 9 layers, T=64": (deep_kimi(9), ("k31 nested", "k31 ops")),
    "kimi_linear, 93 layers, T=64": (deep_kimi(93), ("k31 nested", "k31 ops")),
    "K3.1, 9 layers, decode": (deep_k31(9), ("k31 nested", "dynamo alone")),
    "K3.1, 93 layers, decode": (deep_k31(93), ("k31 nested", "dynamo alone")),
}
_MOST_ERROR = 1e-4


def measure(case: str, variant: str) -> dict[str, Any]:
    """Compile one case in this process and say what it cost."""
    import k31compile.compile_graph

    model, args, kwargs = CASES[case][0]()
    spent = [0.0]
    plain = k31compile.compile_graph.run_pipeline

    def run_pipeline(*arguments: Any) -> Any:
        start = time.process_time()
        try:
            return plain(*arguments)
        finally:
            spent[0] += time.process_time() - start

    k31compile.compile_graph.run_pipeline = run_pipeline
    start, cpu = time.perf_counter(), cpu_seconds()
    with torch.no_grad():
        if variant == "inductor":
            got = torch.compile(model, dynamic=False)(*args, **kwargs)
        elif variant == "dynamo alone":
            got = torch.compile(model, backend="eager", dynamic=False)(*args, **kwargs)
        elif variant == "k31 nested":
            got = k31compile.compile(model, codegen="ops")(*args, **kwargs)
        else:
            options = {"codegen": "ops" if variant == "k31 ops" else "inductor"}
            got = torch.compile(model, backend="k31", options=options, dynamic=False)(*args, **kwargs)
    first = time.perf_counter() - start
    _join_workers()
    cpu = cpu_seconds() - cpu
    if kwargs:  # a shipped model has written its caches by now
        check_against_eager(model, args, kwargs, got)
    report = k31compile.last_report() if variant.startswith("k31") else None
    return {
        "first": first,
        "cpu": cpu,
        "passes": spent[0],
        "fused": sum(report.fused.values()) if report else 0,
    }


def check_against_eager(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], got: Any) -> None:
    """End with a sentence where the compiled logits are not those of eager."""
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(*args, **kwargs).logits
    error = float((got.logits - expected).abs().max() / expected.abs().max())
    if error > _MOST_ERROR:
        raise SystemExit(f"compiled differs from eager by {error:.1e}, more than {_MOST_ERROR:.0e}")


def _join_workers() -> None:
    """End Inductor's worker processes, so that their seconds are counted."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


def measure_elsewhere(case: str, variant: str) -> dict[str, Any]:
    """The same in a fresh process with empty caches of Inductor."""
    with empty_caches() as environment:
        return run_elsewhere(__file__, ["--one", case, variant], environment)


def main() -> None:
    """Measure the cases, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measure(*chosen.one)))
        return
    rows = []
    for case in chosen.case or CASES:
        variants = CASES[case][1]
        runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
        for _ in range(chosen.repeats):
            for variant in variants:
                runs[variant].append(measure_elsewhere(case, variant))
                print(f"{case}, {variant}: {runs[variant][-1]}", file=sys.stderr)
        rows += [_row(case, variant, runs) for variant in variants]
    _print(rows)
    if chosen.output:
        chosen.output.write_text(json.dumps({"rows": rows, "torch": torch.__version__}, indent=1))


def _row(case: str, variant: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def median(of: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[of])

    row: dict[str, Any] = {"case": case, "variant": variant, "fused": runs[variant][0]["fused"]}
    row |= {key: median(variant, key) for key in ("first", "cpu", "passes")}
    if "inductor" in runs:
        row["first ratio"] = median("inductor", "first") / row["first"]
        row["cpu ratio"] = median("inductor", "cpu") / row["cpu"]
    return row


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"compiling, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for column in (
        "case",
        "variant",
        "first s",
        "cpu s",
        "passes cpu s",
        "fused",
        "first x Inductor",
        "cpu x Inductor",
    ):
        table.add_column(column)
    for row in rows:
        ratios = [f"{row[key]:.2f}" if key in row else "" for key in ("first ratio", "cpu ratio")]
        seconds = [f"{row[key]:.1f}" for key in ("first", "cpu", "passes")]
        table.add_row(row["case"], row["variant"], *seconds, str(row["fused"]), *ratios)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
