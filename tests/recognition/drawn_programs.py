"""Drawn programs before and after the fusions, next to their eager selves."""

import sys
from collections import Counter
from pathlib import Path

import torch
from stable_topk import stable_eager
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))
sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))

from captured import operators, sketch
from judging import difference
from operands import operands

from k31compile.options import Options
from k31compile.passes.pipeline import run_pipeline

BOUND = 2e-5
BESIDE = {"sparse_flash_attention": {"k31.lightning_indexer"}}
"""What may be rightly fused in front of a near miss."""


def rewritten(program, fuse="all"):
    """Our operators in the rewritten graph, and how far its numbers are from the program's own."""
    (length,) = program.lengths
    fn, tensors = flattened(program.fn, operands(program, length, torch.float32, 0))
    module, stages = run_pipeline(sketch(fn, *copies(tensors)).module, Options(fuse=fuse), "cpu")
    assert not [stage.undone for stage in stages if stage.undone]
    found = Counter(name for name in operators(module) if name.startswith("k31."))
    mine, theirs = copies(tensors), copies(tensors)
    with torch.no_grad():
        got = module(*mine)
        # Our operators have a rule for equal scores; torch's own top-k has none, but is the same on both sides.
        want = stable_eager(fn, *theirs) if found else fn(*theirs)
    return found, difference(named(program, got, mine), named(program, want, theirs))


def flattened(fn, arguments):
    """`fn` as a function of tensors alone, and those: a sketch takes neither lists nor numbers."""
    leaves, spec = pytree.tree_flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors):
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return fn(*pytree.tree_unflatten(filled, spec))

    return call, [leaves[place] for place in places]


def copies(tensors):
    return [tensor.clone() for tensor in tensors]


def named(program, returned, arguments):
    """The results by name, and what the program left in the arguments that are floats."""
    returned = returned if isinstance(returned, tuple) else (returned,)
    left = {f"argument {i}": x for i, x in enumerate(arguments) if x.is_floating_point()}
    return dict(zip(program.results, returned, strict=True)) | left


def hold_spelling(program, fuse="all"):
    """Exactly the operators that it should become, and its own numbers."""
    found, error = rewritten(program, fuse)
    assert found == {f"k31.{name}": count for name, count in program.counts.items()}, program.peculiar
    assert error < BOUND, program.peculiar


def hold_near_miss(program, fuse="all"):
    """The author's numbers stay; an operator appears only where other operands make it right."""
    found, error = rewritten(program, fuse)
    assert error < BOUND, program.peculiar
    assert not (found.keys() - BESIDE.get(program.operator, set()) and program.excluded), program.peculiar
