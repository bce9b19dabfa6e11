"""The operators against the plain PyTorch that they replace, side by side in one process.

    python benchmarks/bench_kernels.py [--quick] [--threads N] [--output FILE]

Every row alternates the two, and takes the median of the CPU time of the calling thread (of wall time when more than
one thread runs), because the machine may be shared. `ratio` is other / k31, `spread` the distance between the
quartiles of the alternations' ratios over their median, `roof` the share of this run's matrix multiplication in the
same dtype, `peak_extra_bytes` what one call of ours needs beyond inputs and results (null where that is not told).
Baselines: "eager" computes as the author would, in the tensors' dtype; "eager-float32" upcasts first, which is what
helps most where the machine has no bfloat16 arithmetic; prefill is trimmed causally in chunks of 128 rows.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

import k31compile.kernels as kernels
from k31compile.model import K31Config
from k31compile.model.delta_rule import kda_chunk, kda_recurrent
from k31compile.model.moe import Experts

HEADS, WIDTH, LATENT, ROPE = 64, 128, 512, 64
CHUNK = 128
SECONDS_PER_ROW = 3.0


@dataclass
class Row:
    suite: str
    name: str
    case: str
    against: str
    ratio: float
    spread: float
    roof: float | None
    peak_extra_bytes: int | None
    threads: int


@dataclass
class Case:
    name: str
    label: str
    dtype: torch.dtype
    flops: float
    ours: Callable[[], object]
    others: dict[str, Callable[[], object]]


def clock() -> int:
    return time.thread_time_ns() if torch.get_num_threads() == 1 else time.perf_counter_ns()


def alternate(ours: Callable[[], object], other: Callable[[], object]) -> tuple[list[int], list[int]]:
    """Nanoseconds of both, alternating, at least five times and for some seconds."""
    ours(), other()
    mine, theirs = [], []
    end = time.monotonic() + SECONDS_PER_ROW
    while len(mine) < 5 or (time.monotonic() < end and len(mine) < 100):
        start = clock()
        ours()
        middle = clock()
        other()
        mine.append(middle - start)
        theirs.append(clock() - middle)
    return mine, theirs


def peak_extra_bytes(call: Callable[[], object]) -> int | None:
    """Growth of the resident peak over one call beyond its results, by the kernel's own books."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def kilobytes(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    try:
        reset.write_text("5")
        before = kilobytes("VmRSS")
        results = pytree.tree_leaves(call())
        returned = sum(result.nbytes for result in results if isinstance(result, torch.Tensor))
        return max(0, (kilobytes("VmHWM") - before) * 1024 - returned)
    except (OSError, StopIteration):
        return None


def probe(dtype: torch.dtype) -> float:
    """Multiplications and additions per nanosecond of a large product; for bfloat16 the better of both dtypes."""
    rates = []
    for kind in {dtype, torch.float32}:
        matrix = torch.randn(1024, 1024).to(kind)
        if kind == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
            continue  # minutes long, and never the better one
        times = []
        for _ in range(5):
            start = clock()
            matrix @ matrix
            times.append(clock() - start)
        rates.append(2 * 1024**3 / min(times))
    return max(rates)


def indexer_decode(dtype: torch.dtype, rows: int, positions: int, count: int) -> Case:
    query = torch.randn(1, rows, HEADS, WIDTH).to(dtype)
    key = torch.randn(1, positions, 1, WIDTH).to(dtype)
    weights = torch.randn(1, rows, HEADS).to(dtype)

    def plain(kind: torch.dtype) -> torch.Tensor:
        dots = torch.einsum("thd,sd->ths", query[0].to(kind), key[0, :, 0].to(kind)).relu()
        return (dots * weights[0].to(kind)[..., None]).sum(1).topk(count, dim=-1).indices

    def ours() -> torch.Tensor:
        return torch.ops.k31.lightning_indexer(query, key, weights, sparse_count=count, sparse_mode=0)

    flops = 2.0 * rows * positions * HEADS * WIDTH
    label = f"{name_of(dtype)} T={rows} S={positions} K={count}"
    return Case("lightning_indexer", f"decode {label}", dtype, flops, ours, baselines(dtype, plain))


def indexer_prefill(dtype: torch.dtype, rows: int, count: int) -> Case:
    query = torch.randn(1, rows, HEADS, WIDTH).to(dtype)
    key = torch.randn(1, rows, 1, WIDTH).to(dtype)
    weights = torch.randn(1, rows, HEADS).to(dtype)

    def plain(kind: torch.dtype) -> list[torch.Tensor]:
        picked = []
        for start in range(0, rows, CHUNK):
            end = min(start + CHUNK, rows)
            part = query[0, start:end].to(kind)
            dots = torch.einsum("thd,sd->ths", part, key[0, :end, 0].to(kind)).relu()
            scores = (dots * weights[0, start:end].to(kind)[..., None]).sum(1)
            hidden = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
            scores = scores.masked_fill(hidden, -math.inf)
            picked.append(scores.topk(min(count, end), dim=-1).indices)
        return picked

    def ours() -> torch.Tensor:
        return torch.ops.k31.lightning_indexer(query, key, weights, sparse_count=count)

    scored = sum(seen for seen in range(1, rows + 1) if seen > count)
    label = f"{name_of(dtype)} T=S={rows} K={count}"
    flops = 2.0 * scored * HEADS * WIDTH
    return Case("lightning_indexer", f"prefill {label}", dtype, flops, ours, baselines(dtype, plain))


def attention(dtype: torch.dtype, rows: int, heads: int, positions: int, count: int) -> Case:
    cache = torch.randn(1, positions, 1, LATENT + ROPE).to(dtype)
    query = torch.randn(1, rows, heads, LATENT + ROPE).to(dtype)
    lists = [torch.randperm(positions)[:count].sort().values for _ in range(rows)]
    indices = torch.stack(lists).view(1, rows, 1, count).to(torch.int32)
    latent, rope = cache[..., :LATENT], cache[..., LATENT:]

    def plain(kind: torch.dtype) -> torch.Tensor:
        picked = cache[0, :, 0][indices[0, :, 0].long()].to(kind)
        logits = torch.einsum("thd,tkd->thk", query[0].to(kind), picked) * 0.05
        weight = torch.softmax(logits, -1, dtype=torch.float32).to(kind)
        return torch.einsum("thk,tkd->thd", weight, picked[..., :LATENT])

    def ours() -> torch.Tensor:
        return torch.ops.k31.sparse_flash_attention(
            query[..., :LATENT],
            latent,
            latent,
            indices,
            0.05,
            query_rope=query[..., LATENT:],
            key_rope=rope,
            sparse_mode=0,
        )

    flops = 2.0 * rows * count * heads * (2 * LATENT + ROPE)
    label = f"{name_of(dtype)} T={rows} H={heads} S={positions} K={count}"
    return Case("sparse_flash_attention", label, dtype, flops, ours, baselines(dtype, plain))


def delta_rule(dtype: torch.dtype, batch: int, rows: int, heads: int) -> Case:
    """Against the recurrence for one row, and against the model's chunk form with factored decays for more."""
    shape = (batch, rows, heads, WIDTH)
    query, value = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    key = torch.nn.functional.normalize(torch.randn(shape), dim=-1).to(dtype)
    gate, beta = -torch.rand(shape), torch.rand(shape[:3])
    state = torch.randn(batch, heads, WIDTH, WIDTH)
    name = "kda_recurrent" if rows == 1 else "kda_chunk"
    operator = getattr(torch.ops.k31, name)

    def plain(kind: torch.dtype) -> object:
        if rows == 1:
            return kda_recurrent(query, key, value, gate, beta, state)
        return kda_chunk(query, key, value, gate, beta, state, anchored=True)

    def ours() -> object:
        return operator(query, key, value, gate, beta, state)

    label = f"{name_of(dtype)} B={batch} T={rows} H={heads} K=V={WIDTH}"
    return Case(name, label, dtype, 0.0, ours, {"eager": lambda: plain(dtype)})


def experts(dtype: torch.dtype, rows: int) -> Case:
    """32 experts, 4 a token, against gathering their weights (few tokens) and one product an expert (more)."""
    count, chosen, width = 32, 4, 256
    gate_up, down = torch.randn(count, 2 * width, width).to(dtype), torch.randn(count, width, width).to(dtype)
    x, weights = torch.randn(rows, width).to(dtype), torch.rand(rows, chosen)
    index = torch.stack([torch.randperm(count)[:chosen] for _ in range(rows)])
    config = K31Config(
        num_experts=count,
        num_experts_per_token=chosen,
        routed_expert_hidden_size=width,
        moe_intermediate_size=width,
        moe_form="gather" if rows == 1 else "grouped",
    )
    layer = Experts(config)
    layer.gate_up_proj.data, layer.down_proj.data = gate_up, down
    gate, up = gate_up.split(width, dim=1)

    def ours() -> object:
        return torch.ops.k31.grouped_experts(x, index, weights, [gate], [up], [down])

    label = f"{name_of(dtype)} N={rows} E={count} k={chosen} L=I={width}"
    return Case("grouped_experts", label, dtype, 0.0, ours, {"eager": lambda: layer(x, index, weights)})


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def baselines(dtype: torch.dtype, plain: Callable[[torch.dtype], object]) -> dict[str, Callable[[], object]]:
    others: dict[str, Callable[[], object]] = {"eager": lambda: plain(dtype)}
    if dtype != torch.float32:
        others["eager-float32"] = lambda: plain(torch.float32)
    return others


def cases(quick: bool) -> list[Callable[[], Case]]:
    both = (torch.bfloat16, torch.float32)
    sizes = [(1, 4096), (1, 16384)] if quick else [(1, 4096), (1, 16384), (1, 65536), (4, 4096), (4, 16384)]
    made = [lambda d=d, t=t, s=s: indexer_decode(d, t, s, 2048) for d in both for t, s in sizes]
    made += [lambda d=d: indexer_prefill(d, 512 if quick else 1024, 256) for d in both]
    shapes = [(1, 16, 16384), (1, 64, 16384)]
    shapes += [] if quick else [(4, 16, 16384), (32, 16, 4096)]
    made += [lambda d=d, x=x: attention(d, *x, 2048) for d in both for x in shapes]
    steps = [(1, 1, 96), (8, 1, 96)]
    made += [lambda d=d, x=x: delta_rule(d, *x) for d in both for x in [*steps, (1, 512, 8)]]
    made += [lambda d=d, n=n: experts(d, n) for d in both for n in (1, 16, 512)]
    return made


def measure(case: Case, roof: float) -> list[Row]:
    rows = []
    extra = peak_extra_bytes(case.ours)
    for against, other in case.others.items():
        mine, theirs = alternate(case.ours, other)
        ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        share = case.flops / statistics.median(mine) / roof if case.flops else None
        row = Row(
            "kernels",
            case.name,
            case.label,
            against,
            round(middle, 3),
            round((high - low) / middle, 3),
            None if share is None else round(share, 3),
            extra,
            torch.get_num_threads(),
        )
        print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the JSON here instead of to standard output")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    roofs = {dtype: probe(dtype) for dtype in (torch.float32, torch.bfloat16)}
    with torch.no_grad():
        rows = [row for make in cases(options.quick) for case in [make()] for row in measure(case, roofs[case.dtype])]
    report = {
        "rows": [asdict(row) for row in rows],
        "machine": {"processor": platform.machine(), "provider": kernels.provider_for("lightning_indexer").provider},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    text = json.dumps(report, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
