"""The corpus' programs of one operator, run by the compiled graph's operators and by their own eager selves."""

import sys
from pathlib import Path

import torch
from running import run

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))

from catalogue import NEAR_MISSES, SPELLINGS
from judging import difference
from operands import operands


def spellings(operator):
    return {name: program for name, program in SPELLINGS.items() if program.operator == operator}


def near_misses(operator):
    return {name: program for name, program in NEAR_MISSES.items() if program.operator == operator}


def compiled(program, length, dtype=torch.float32):
    """What was fused, and how far the numbers are from eager's."""
    ran = run(program.fn, *operands(program, length, dtype), stable=False)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (ran.got, ran.want))
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert [x.shape for x in got] == [x.shape for x in want]
    named = (dict(zip(program.results, x, strict=True)) for x in (got, want))
    return ran, difference(*named)
