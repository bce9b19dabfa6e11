"""All programs of the corpus: importing this file fills the two tables of `records`.

For a test of recognition: put this folder on the path, then for each entry `operands.operands(program, length, dtype,
seed)` gives fresh arguments, `program.fn` is what to compile, `program.counts` what it must become; a near miss must
give its eager results whatever is made of it, and must not become `program.operator` where it is `excluded`.
`generate.spellings` and `generate.near_misses` draw more of the same records.
"""

import importlib
from pathlib import Path

from records import NEAR_MISSES, SPELLINGS

__all__ = ["NEAR_MISSES", "SPELLINGS"]

for path in sorted(Path(__file__).parent.glob("*_*.py")):
    if path.stem.endswith(("_styles", "_near_misses")):
        importlib.import_module(path.stem)
