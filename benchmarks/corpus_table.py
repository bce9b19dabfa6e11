"""The corpus through the compiler: how many spellings of each operator are fused, and that no near miss is mistaken.

    python benchmarks/corpus_table.py [--operator NAME ...] [--output FILE]

Every program is compiled as `torch.compile(program, backend="k31", options={"codegen": "ops"})` and its numbers are
compared with its own eager run. "fused" counts the spellings that became all the operators that they are, "mistaken"
near misses that the operator cannot serve and that it served all the same, "wrong" programs of either kind whose
numbers changed. Exit code 1 when one is mistaken or wrong.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "corpus"), str(TESTS / "recognition")]

import attention_styles  # noqa: E402
import catalogue  # noqa: E402
import indexer_styles  # noqa: E402
from operands import operands  # noqa: E402
from running import Run, run  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

BOUND = 1e-4


@dataclass(frozen=True)
class Case:
    """A program with its arguments and what should become of it: counts, or nothing where it is a near miss."""

    operator: str
    name: str
    program: Any
    arguments: tuple[Any, ...]
    counts: dict[str, int]
    excluded: bool = False

    @property
    def is_spelling(self) -> bool:
        """Whether it is the operator."""
        return bool(self.counts)


def cases() -> Iterator[Case]:
    """Every program of the corpus and of the indexer's and the attention's styles."""
    for name, one in catalogue.SPELLINGS.items():
        yield Case(one.operator, name, one.fn, operands(one, one.lengths[0], torch.float32, 0), dict(one.counts))
    for name, one in catalogue.NEAR_MISSES.items():
        arguments = operands(one, one.lengths[0], torch.float32, 0)
        yield Case(one.operator, name, one.fn, arguments, {}, one.excluded)
    for operator, module in (("lightning_indexer", indexer_styles), ("sparse_flash_attention", attention_styles)):
        for name, style in module.STYLES.items():
            arguments = module.operands(style.arguments, "prefill")
            yield Case(operator, name, style.fn, tuple(arguments), {operator: getattr(style, "count", 1)})


def judge(case: Case) -> str:
    """`fused`, `left`, `mistaken` or `wrong`."""
    # Our operators break ties by position; what is left as written breaks them as torch does.
    done = run(case.program, *case.arguments, stable=case.is_spelling)
    if _error(done) > BOUND:
        return "wrong"
    merged = k31_counts(done)
    if case.is_spelling:
        return "fused" if all(merged.get(name, 0) == count for name, count in case.counts.items()) else "left"
    return "mistaken" if case.excluded and merged.get(case.operator) else "left"


def k31_counts(done: Run) -> dict[str, int]:
    """What is fused and what fused operators took in."""
    counts: dict[str, int] = {}
    for report in done.reports:
        told = report.to_dict()
        for part in (told["fused"], told.get("contains", {})):
            for name, count in part.items():
                counts[name] = counts.get(name, 0) + count
    return counts


def _error(done: Run) -> float:
    worst = 0.0
    for got, want in zip(pytree.tree_leaves(done.got), pytree.tree_leaves(done.want), strict=True):
        if got.is_floating_point():
            scale = want.abs().max().clamp_min(1e-30)
            worst = max(worst, float((got.double() - want.double()).abs().max() / scale))
        else:
            worst = max(worst, float((got.sort(-1).values != want.sort(-1).values).any()))
    return worst


def main() -> None:
    """Run the corpus and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operator", action="append", help="only programs of these operators")
    parser.add_argument("--output", type=Path, help="write the outcome of each program as JSON")
    chosen = parser.parse_args()
    logging.getLogger("k31compile").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    todo = [case for case in cases() if not chosen.operator or case.operator in chosen.operator]
    console = Console(stderr=True)
    found = [(case, judge(case)) for case in track(todo, "compiling the corpus", console=console)]
    _print(found)
    if chosen.output:
        rows = [{"operator": c.operator, "name": c.name, "spelling": c.is_spelling, "is": o} for c, o in found]
        chosen.output.write_text(json.dumps(rows, indent=1))
    if any(outcome in ("mistaken", "wrong") for _, outcome in found):
        sys.exit(1)


def _print(found: list[tuple[Case, str]]) -> None:
    table = Table(title="the corpus")
    for column in ("operator", "spellings", "fused", "left as written", "near misses", "mistaken", "wrong"):
        table.add_column(column)
    for operator in sorted({case.operator for case, _ in found}):
        ours = [(case, outcome) for case, outcome in found if case.operator == operator]
        spelled = [outcome for case, outcome in ours if case.is_spelling]
        missed = [outcome for case, outcome in ours if not case.is_spelling]
        left = [case.name for case, outcome in ours if case.is_spelling and outcome == "left"]
        wrong = sum(outcome == "wrong" for _, outcome in ours)
        counts = (len(spelled), spelled.count("fused"), ", ".join(left) or "-", len(missed), missed.count("mistaken"))
        table.add_row(operator, *map(str, counts), str(wrong))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
