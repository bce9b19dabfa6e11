"""All programs of the corpus: importing this file fills the two tables of `records`."""

import importlib
from pathlib import Path

from records import NEAR_MISSES, SPELLINGS

__all__ = ["NEAR_MISSES", "SPELLINGS"]

for path in sorted(Path(__file__).parent.glob("*_*.py")):
    if path.stem.endswith(("_styles", "_near_misses")):
        importlib.import_module(path.stem)
