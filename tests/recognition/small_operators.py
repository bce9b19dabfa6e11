"""Programs of the corpus through one pass, next to their eager selves; and mutants of their graphs."""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from mutation import judge, mutants

FOLDER = Path(__file__).parent.parent
sys.path[:0] = [str(FOLDER / name) for name in ("corpus", "graph")]

import operands  # noqa: E402
from captured import capture, operators, sketch  # noqa: E402
from catalogue import NEAR_MISSES, SPELLINGS  # noqa: E402

import k31compile.kernels  # noqa: E402, F401
from k31compile.options import Options  # noqa: E402
from k31compile.passes.pipeline import run_pipeline  # noqa: E402

__all__ = ["NEAR_MISSES", "SPELLINGS", "cases", "fates", "passed", "through", "with_weights"]

PARTS = {"mega_kda": ("short_conv", "kda_recurrent", "gated_rms_norm")}
"""What must be fused before an operator can be."""


@dataclass(frozen=True)
class Passed:
    """The graph after a pass, why it was not changed, and how far its results are from eager's."""

    module: torch.fx.GraphModule
    reasons: list
    error: float

    def count(self, operator):
        return operators(self.module).count(f"k31.{operator}")

    def call(self, operator):
        return next(n for n in self.module.graph.nodes if str(n.target).startswith(f"k31.{operator}."))


def cases(table, operator):
    """Every length and dtype at which the corpus has a program of the operator."""
    return [
        (name, length, dtype)
        for name, program in table.items()
        if program.operator == operator
        for length in program.lengths
        for dtype in (torch.float32, torch.bfloat16)[: 1 + getattr(program, "half", False)]
    ]


def passed(operator, program, length, dtype):
    """A program of the corpus through the pass of an operator."""
    return through(operator, program.fn, lambda: operands.operands(program, length, dtype, 5))


def with_weights(module):
    """A module as a function of its weights, by name, and of its inputs: a sketch takes no weights by itself."""
    weights = dict(module.requires_grad_(False).named_parameters())

    def call(*args):
        given = dict(zip(weights, args, strict=False))
        return torch.func.functional_call(module, given, args[len(weights) :])

    return call, [weight.clone() for weight in weights.values()]


def through(operator, fn, make, dynamic=None):
    """`fn` of what `make` makes anew each time; results are compared, and what it writes to."""
    traced = sketch(fn, *make()) if dynamic is None else capture(fn, *make(), dynamic=dynamic)
    module, stages = run_pipeline(traced.module, Options(fuse=(operator, *PARTS.get(operator, ()))), "cpu")
    assert not [stage.undone for stage in stages if stage.undone]
    reasons = [refusal.reason for stage in stages for refusal in stage.result.refused]
    if dynamic is not None:
        return Passed(module, reasons, float("nan"))
    module.recompile()
    mine, theirs = make(), make()
    with torch.no_grad():
        got, want = module(*mine), fn(*theirs)
    want = want if isinstance(want, tuple) else (want,)
    errors = [_error(x, y) for x, y in zip((*got, *mine), (*want, *theirs), strict=True)]
    return Passed(module, reasons, max(errors))


def _error(got, want):
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if not want.numel():
        return 0.0
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-300))


def fates(recogniser, program, length, every):
    """What becomes of every `every`-th mutant of a program's graph in float64: counted, and the false ones.

    What must be fused before the recogniser finds anything is fused first.
    """
    made = [operands.operands(program, length, torch.float64, seed) for seed in (1, 2, 3)]
    made += [[x * factor for x in made[0]] for factor in (1e-3, 40.0)]
    module = sketch(program.fn, *made[0]).module
    module, _ = run_pipeline(module, Options(fuse=PARTS.get(recogniser.name, ())), "cpu")
    names = {node.name for node in module.graph.nodes}
    verdicts = [judge(mutant, recogniser, made) for mutant in list(mutants(module, names))[::every]]
    assert verdicts[0].fate == "equivalent", verdicts[0]
    return Counter(verdict.fate for verdict in verdicts), [v for v in verdicts if v.fate == "FALSE"]
