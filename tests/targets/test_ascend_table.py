"""The page about operators on Ascend says what the code says."""

import subprocess
import sys
from pathlib import Path

import pytest

from k31compile.kernels.registry import OPERATORS
from k31compile.targets.ascend.constraint_tables_later import ALL_TABLES
from k31compile.targets.ascend.lowerings.registry import LOWERINGS
from k31compile.targets.ascend.table import page

PAGE = Path(__file__).parents[2] / "docs" / "ascend-operators.md"


def test_the_page_is_what_the_code_says():
    told = "stale; run: python -m k31compile.targets.ascend.table docs/ascend-operators.md"
    assert PAGE.read_text(encoding="utf-8") == page(), told


@pytest.mark.parametrize("operator", sorted(name for name, one in OPERATORS.items() if not one.is_for_cpu))
def test_every_operator_has_a_row_and_a_formula(operator):
    assert f"| `{operator}` | " in page()
    assert [one.provider for one in LOWERINGS[operator]].count("formula") == 1


@pytest.mark.parametrize("operator", sorted(ALL_TABLES))
def test_every_table_of_limits_is_there(operator):
    assert f"### {operator}" in page()


def test_the_command_writes_the_page(tmp_path):
    out = tmp_path / "page.md"
    subprocess.run([sys.executable, "-P", "-m", "k31compile.targets.ascend.table", str(out)], check=True)
    assert out.read_text(encoding="utf-8") == page()
