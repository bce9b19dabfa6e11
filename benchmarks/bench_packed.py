"""Linear layers with packed copies of their weights against plain ones, on the CPU: python benchmarks/bench_packed.py

One thread, CPU time, both sides in turns in one process. The ratio is that of the medians, plain / packed: above 1
packing is faster. The layers' weights together are larger than a cache. --one-row lets one row read a copy too.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn

from k31compile import last_report
from k31compile.targets import packed_linear
from k31compile.targets.packed_weights import PACKED, packed_dtype

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Layers(nn.Module):
    """Some square layers, one after the other."""

    def __init__(self, width, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def measure(functions, x, rounds):
    """Seconds of each function, in turns; the first call of each is not counted."""
    spent = {name: [] for name in functions}
    for function in functions.values():
        function(x)
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.process_time()
            function(x)
            spent[name].append(time.process_time() - begin)
    return spent


def row(dtype, rows, width, count, rounds):
    torch._dynamo.reset()
    PACKED.clear()
    torch.manual_seed(0)
    model, x = Layers(width, count).to(DTYPES[dtype]).eval(), torch.randn(rows, width, dtype=DTYPES[dtype])
    functions = {
        layout: torch.compile(model, backend="k31", dynamic=False, options={"codegen": "ops", "layout": layout})
        for layout in ("nd", "nz")
    }
    spent = measure({"nd": functions["nd"], "nz": functions["nz"]}, x, rounds)
    middle = {name: statistics.median(times) for name, times in spent.items()}
    quarters = statistics.quantiles(spent["nz"], n=4)
    return {
        "case": f"{count} layers of {width}, M = {rows}, {dtype}",
        "packed_in": str(packed_dtype(DTYPES[dtype])).removeprefix("torch."),
        "ratio": middle["nd"] / middle["nz"],
        "spread": (quarters[2] - quarters[0]) / middle["nz"],
        "packed": sum(entry["layout"] == "nz" for entry in last_report().weights),
        "packed_bytes": PACKED.nbytes(),
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 16])
    parser.add_argument("--one-row", action="store_true", help="one row reads a copy, too")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one_row:
        packed_linear._is_faster_plain = lambda x, weight: False
    with torch.no_grad():
        rows = [row(d, m, given.width, given.layers, given.rounds) for d in DTYPES for m in given.rows]
    if given.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    for each in rows:
        extra = each["packed_bytes"] / each["weight_bytes"]
        print(
            f"{each['case']:34} packed in {each['packed_in']:8} {each['ratio']:.2f} times as fast as plain "
            f"(spread {each['spread']:.2f}), copies {extra:.2f} times the weights"
        )


if __name__ == "__main__":
    main()
