"""How long a new process takes to its first result: eager, Inductor and k31, cold, warm and ahead of time.

    python benchmarks/bench_start.py [--model NAME ...] [--repeats N] [--output FILE]

Each row is a process of its own. `wall` is from its start to the first result, interpreter, `import torch` and the
making of the model included; `first call` is from the model to the result; `cpu` counts the children. `warm` runs on
the caches that `cold` left; `AOT` loads the F.k31 that was made before, and makes no model. Medians over the repeats,
each of which begins with empty caches. Every result is compared with eager's.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k31compile.bench.fresh import cpu_seconds, empty_caches, folder_size, run_elsewhere

Rows = dict[tuple[str, str], list[dict[str, Any]]]

VARIANTS = ("eager", "inductor cold", "inductor warm", "k31 cold", "k31 warm", "k31 AOT")
_MOST_ERROR = 1e-3


def mini() -> Any:
    """A decode step of `mini`, 9 layers."""
    from k31compile.cli.target import load_entries

    return load_entries("mini:decode")[0]


def kimi_linear() -> Any:
    """transformers' kimi_linear, unmodified: two KDA layers and one of attention, a prompt of 64 tokens."""
    import torch
    import transformers

    import k31compile

    config = transformers.KimiLinearConfig(
        vocab_size=199, hidden_size=256, intermediate_size=512, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"], linear_head_dim=64,
        linear_num_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, mlp_layer_types=["dense", "sparse", "sparse"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.KimiLinearForCausalLM(config).eval()
    tokens = torch.randint(3, 199, (1, 64), generator=torch.Generator().manual_seed(0))
    return k31compile.Entry("kimi_linear", model, (tokens,), {"use_cache": False})


MODELS: dict[str, Callable[[], Any]] = {"mini": mini, "kimi_linear": kimi_linear}


def measure(name: str, variant: str, file: str) -> dict[str, Any]:
    """The first result of this process."""
    import torch

    imported = time.time()
    if variant == "k31 AOT":
        return {**_run_artefact(file), "imported": imported}
    entry = MODELS[name]()
    start = time.time()
    kind = variant.split()[0]
    program: Any = entry.model
    if kind != "eager":
        program = torch.compile(program, dynamic=False, backend=kind)
    with entry.grad_mode():
        got = program(*entry.args, **entry.kwargs)
    end, cpu = time.time(), cpu_seconds()
    found = {"end": end, "imported": imported, "first": end - start, "cpu": cpu, "digest": _digest(got)}
    if kind == "k31":
        import k31compile

        found["hits"] = [report.cache["hit"] for report in k31compile.reports()]
    return found


def _run_artefact(file: str) -> dict[str, Any]:
    import torch

    import k31compile

    start = time.time()
    artefact = k31compile.load(file)
    (name,) = artefact.entries
    tensors, _ = artefact.example(name)
    program = artefact.program(name)
    with torch.no_grad():
        program.check(tensors)
        outputs, _ = program.compute(tensors)
    end, cpu = time.time(), cpu_seconds()
    return {"end": end, "first": end - start, "cpu": cpu, "digest": _digest(outputs[0])}


def _digest(got: Any) -> list[float]:
    """Some numbers of the logits, to be compared with those of eager."""
    logits = getattr(got, "logits", got)
    if isinstance(logits, tuple | list):
        logits = logits[0]
    flat = logits.double().reshape(-1)
    return [float(flat.abs().max()), *(float(value) for value in flat[:: max(1, flat.numel() // 16)])]


def make_artefact(name: str, file: Path) -> None:
    """Compile a model ahead of time, in this process."""
    from k31compile.ahead.make import make_artefact as make

    make([MODELS[name]()], file)


def measure_all(name: str, rows: Rows) -> dict[str, tuple[int, int]]:
    """Every variant once, beginning with empty caches; the sizes of these after it."""
    with empty_caches() as environment:
        folder = Path(environment["K31_CACHE_DIR"])
        file = folder.parent / "F.k31"
        for variant in VARIANTS:
            if variant == "k31 AOT":
                run_elsewhere(__file__, ["--make", name, str(file)], environment)
            begin = time.time()
            one = run_elsewhere(__file__, ["--one", name, variant, str(file)], environment)
            one |= {"wall": one["end"] - begin}
            expected = rows.get((name, "eager"), [one])[0]["digest"]
            error = max(abs(a - b) for a, b in zip(one["digest"], expected, strict=True)) / expected[0]
            if error > _MOST_ERROR:
                raise SystemExit(f"{name}, {variant} differs from eager by {error:.1e}")
            if variant == "k31 warm" and not all(one["hits"]):
                raise SystemExit(f"{name}: a warm start compiled something")
            rows.setdefault((name, variant), []).append(one)
            print(f"{name}, {variant}: wall {one['wall']:.2f} s, cpu {one['cpu']:.2f} s", file=sys.stderr)
        inductor = folder_size(Path(environment["TORCHINDUCTOR_CACHE_DIR"]))
        return {
            "inductor": inductor,
            "k31 graphs": folder_size(folder / "graphs"),
            "F.k31 and weights": folder_size_of_artefact(file),
        }


def folder_size_of_artefact(file: Path) -> tuple[int, int]:
    """Bytes and number of an artefact and of what lies beside it."""
    files = list(file.parent.glob("F.*"))
    return sum(path.stat().st_size for path in files), len(files)


def main() -> None:
    """Measure, and print the table as markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="only these")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measure(*chosen.one)))
        return
    if chosen.make:
        make_artefact(chosen.make[0], Path(chosen.make[1]))
        print("{}")
        return
    rows: Rows = {}
    sizes = {}
    for name in chosen.model or MODELS:
        for _ in range(chosen.repeats):
            sizes[name] = measure_all(name, rows)
    _print(rows, sizes)
    if chosen.output:
        flat = [{"model": name, "variant": variant, "runs": runs} for (name, variant), runs in rows.items()]
        chosen.output.write_text(json.dumps({"rows": flat, "sizes": sizes}, indent=1))


def _print(rows: Rows, sizes: dict[str, dict[str, tuple[int, int]]]) -> None:
    print("| model | start | wall s | first call s | CPU s |\n|---|---|---|---|---|")
    for (name, variant), runs in rows.items():
        wall, first, cpu = (statistics.median(run[key] for run in runs) for key in ("wall", "first", "cpu"))
        print(f"| {name} | {variant} | {wall:.2f} | {first:.2f} | {cpu:.2f} |")
    print("\n| model | kept by | bytes | files |\n|---|---|---|---|")
    for name, kept in sizes.items():
        for what, (count, files) in kept.items():
            print(f"| {name} | {what} | {count / 1e6:.1f} MB | {files} |")


if __name__ == "__main__":
    main()
