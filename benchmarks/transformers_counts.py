"""What is fused in transformers' kimi_linear and deepseek_v32, unmodified, graph by graph: found / layers that have it.

    python benchmarks/transformers_counts.py [--json]

Each model runs four ways on small random weights: one call; `generate` with a static cache; the same for a left-padded
batch whose prompts come in chunks ("padded chunks"); and `generate` that compiles its own steps by its `compile_config`
("own compile"). `tokens` compares the greedy tokens with eager ones, exactly. Ends with 1 where something is missing,
breaks the graph or differs. Needs the extra `hf`.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch._dynamo.utils import counters
from transformers.generation.configuration_utils import CompileConfig

from k31compile.cli import console
from k31compile.report import clear_reports, reports

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from transformers_entries import deepseek_v32_model, kimi_linear_model, prompts

OPTIONS = {"codegen": "ops"}
LENGTH, NEW, CHUNK, PADDING = 30, 5, 15, 7
CALLS = {
    "one call": ["prefill"],
    "generate": ["prefill", "decode"],
    "padded chunks": ["first chunk", "next chunk", "decode"],
    "own compile": ["decode"],
}
# What a layer has, and the operators that serve it; one that takes in its neighbours serves them too.
PARTS = {
    "KDA": ("kda_chunk", "kda_recurrent", "mega_kda"),
    "short conv": ("short_conv", "mega_kda"),
    "gated norm": ("gated_rms_norm", "mega_kda"),
    "indexer": ("lightning_indexer",),
    "sparse attention": ("sparse_flash_attention",),
    "router": ("moe_gating_top_k",),
    "experts": ("grouped_experts",),
}
MODELS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "kimi_linear": (kimi_linear_model, {"KDA": 2, "short conv": 2, "gated norm": 2, "router": 2, "experts": 2}),
    "deepseek_v32": (deepseek_v32_model, {"indexer": 3, "sparse attention": 3, "router": 2, "experts": 2}),
}
EXPECTED = len(MODELS) * sum(map(len, CALLS.values()))


@dataclass
class Row:
    """One graph: parts found by name, each with the number of layers that have it."""

    model: str
    call: str
    graph: str
    parts: dict[str, tuple[int, int]]
    breaks: int
    tokens_equal: bool

    @property
    def complete(self) -> bool:
        return self.tokens_equal and not self.breaks and all(found == wanted for found, wanted in self.parts.values())


def run(model: Any, call: str, is_compiled: bool) -> torch.Tensor:
    """The greedy tokens of one way to call the model, compiled by k31 or eager."""
    ids, mask = prompts(LENGTH, PADDING if "padded" in call else 0)
    with_config = is_compiled and call == "own compile"
    if is_compiled and not with_config:
        model.forward = torch.compile(model.forward, backend="k31", options=OPTIONS)
    if call == "one call":
        return model(ids, use_cache=False).logits.argmax(-1)
    how: dict[str, Any] = {"disable_compile": not with_config}
    if with_config:
        how["compile_config"] = CompileConfig(backend="k31", fullgraph=False, mode=None, options=OPTIONS)
        how["compile_config"]._compile_all_devices = True  # without it transformers compiles for accelerators only
    return model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        cache_implementation="static",
        prefill_chunk_size=CHUNK if "chunks" in call else None,
        **how,
    )


def measure(name: str, call: str) -> Iterator[Row]:
    """The rows of one model called in one way."""
    make, layers = MODELS[name]
    torch._dynamo.reset()
    counters.clear()
    clear_reports()
    with torch.no_grad():
        wanted = run(make(), call, is_compiled=False)
        found = run(make(), call, is_compiled=True)
    equal, breaks = torch.equal(found, wanted), sum(counters["graph_break"].values())
    found_graphs = reports()
    graphs = CALLS[call] if len(found_graphs) == len(CALLS[call]) else [f"graph {i}" for i in range(len(found_graphs))]
    for graph, report in zip(graphs, found_graphs, strict=True):
        parts = {part: (sum(report.fused.get(op, 0) for op in PARTS[part]), count) for part, count in layers.items()}
        yield Row(name, call, graph, parts, breaks, equal)


def render(rows: list[Row], out: Console) -> None:
    """One table: models and graphs down, parts across."""
    table = console.table("model", "call", "graph", *PARTS, "breaks", "tokens")
    for row in rows:
        parts = ["/".join(map(str, row.parts[part])) if part in row.parts else "" for part in PARTS]
        table.add_row(
            row.model, row.call, row.graph, *parts, str(row.breaks), "equal" if row.tokens_equal else "DIFFER"
        )
    out.print(table)
    complete = sum(row.complete for row in rows)
    out.print(f"{complete} of {EXPECTED} graphs complete")


def main() -> int:
    """Measure all, print, and say by the exit code whether all is fused."""
    if console.take_flags(sys.argv[1:]):
        print(__doc__, file=sys.stderr)
        return 2
    rows: list[Row] = []
    pairs = [(name, call) for name in MODELS for call in CALLS]
    with console.progress("compile", len(pairs)) as advance:
        for name, call in pairs:
            advance(f"{name}, {call}")
            rows += measure(name, call)
    complete = len(rows) == EXPECTED and all(row.complete for row in rows)
    data = {"rows": [{**asdict(row), "complete": row.complete} for row in rows], "complete": complete}
    console.emit(data, lambda out: render(rows, out))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
