"""The page docs/ascend-operators.md, made from the code: `python -m k31compile.targets.ascend.table [PATH]`.

Without a path it prints the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import k31compile.kernels
import k31compile.targets.ascend.lowerings  # noqa: F401  (registers the lowerings)
from k31compile.kernels.registry import OPERATORS
from k31compile.targets.ascend.constraint_tables_later import ALL_TABLES
from k31compile.targets.ascend.decompositions import OURS as FORMULAS
from k31compile.targets.ascend.lowerings.registry import Lowering, in_order
from k31compile.targets.ascend.plain_formulas import TORCHS
from k31compile.targets.ascend.profiles import PROFILES
from k31compile.targets.ascend.providers import FORMULA, OURS, PROVIDERS, TORCH_NPU

_HEAD = """# Operators on Ascend

This page is made by `python -m k31compile.targets.ascend.table docs/ascend-operators.md`; a test fails when it is not
what the code says. Nothing on it was run on an NPU: limits are the documentation's, structure is checked offline
(docs/ascend.md).

## What each operator becomes

For each call the providers are asked in this order; one whose limits hold is taken, of several the one of least
predicted time, and the formula where none takes the call. The report names the choice, its predicted time, and what was
passed over and why. *GE* means a graph for GE can hold it, *npugraph_ex* that only such a graph can, *never* that it is
known and does something else.

| k31 operator | provider | calls | in |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, *_rows(), _providers(), _limits(), _formulas()]
    return "".join(parts)


def _rows() -> Iterator[str]:
    for operator in sorted(name for name, one in OPERATORS.items() if not one.is_for_cpu):
        lowerings = in_order(operator)
        if not lowerings:
            yield f"| `{operator}` | none | | refused, with the reason |\n"
        for i, one in enumerate(lowerings):
            name = f"`{operator}`" if i == 0 else ""
            calls = "plain operators" if one.provider == FORMULA else f"`{one.calls}`"
            yield f"| {name} | {one.provider} | {calls} | {_where(one)} |\n"


def _where(one: Lowering) -> str:
    if one.never:
        return f"never: {one.never}"
    if one.provider == OURS:
        return "GE, as one node, where a package with its kernel is declared"
    if not PROVIDERS[one.provider].in_ge or not one.in_ge:
        return "npugraph_ex"
    return "GE"


def _providers() -> str:
    lines = ["\n## Whose operators\n\n", "| provider | package | from version | GE converters | signatures read in |\n"]
    lines.append("|---|---|---|---|---|\n")
    for one in PROVIDERS.values():
        package = f"`{one.module}`" if one.module else ""
        in_ge = "yes" if one.in_ge else "no"
        lines.append(f"| {one.name} | {package} | {one.minimum} | {in_ge} | {one.source} |\n")
    return "".join(lines)


def _limits() -> str:
    lines = [
        "\n## Limits\n\n",
        "Checked before a call is lowered, since meta functions accept almost anything; ",
        "each ",
    ]
    lines.append("violation names the limit and the remedy. Quantised operators are entered before they are lowered.\n")
    called = {one.calls for operator in OPERATORS for one in in_order(operator) if one.provider == TORCH_NPU}
    for operator, table in ALL_TABLES.items():
        used = "" if operator in called or operator.startswith("fla_npu") else " (no lowering of its own name yet)"
        lines.append(
            f"\n### {operator}{used}\n\nFrom: {table.source}.\n\n| quantity | {' | '.join(PROFILES)} | remedy |\n"
        )
        lines.append("|---|---|---|---|\n")
        for one in table.constraints:
            allowed = " | ".join(one.allowed if product in one.products else "" for product in PROFILES)
            lines.append(f"| {one.what} | {allowed} | {one.remedy} |\n")
    return "".join(lines)


def _formulas() -> str:
    names, taken = (", ".join(f"`{one}`" for one in sorted(map(str, table))) for table in (FORMULAS, TORCHS))
    return (
        "\n## ATEN operators by formula\n\nGE has no converter for these; each is written by others that have one, and "
        f"held to its operator by a test in float64: {names}. Torch's own decompositions are taken for {taken}. What "
        "is left without a converter is refused before torchair is asked, all in one error with the model's lines.\n"
    )


def main(arguments: list[str]) -> None:
    """Write the page to the path that is given, or print it."""
    if arguments:
        Path(arguments[0]).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
