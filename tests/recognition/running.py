"""Run a program compiled by k31 with codegen "ops", next to its own eager self."""

from dataclasses import dataclass
from typing import Any

import torch
from stable_topk import stable_eager
from torch.utils import _pytree as pytree

import k31compile


@dataclass
class Run:
    """What the compiled program gave, what the eager one gave, and the reports of the graphs that were compiled."""

    got: Any
    want: Any
    reports: list

    @property
    def fused(self):
        return k31compile.Report.merge(self.reports).fused

    @property
    def refused(self):
        return [refusal for report in self.reports for refusal in report.refused]

    @property
    def reasons(self):
        return " | ".join(str(refusal) for refusal in self.refused)

    @property
    def notes(self):
        return [note for report in self.reports for note in report.notes]


def compiled(fn, **how):
    """`torch.compile` as every test here uses it."""
    options = {"codegen": "ops", **how.pop("options", {})}
    return torch.compile(fn, backend="k31", options=options, **how)


def run(fn, *args, stable=True, **how):
    """Compile `fn`, run it on copies of `args`, and run it eagerly on other copies, by default with a rule for ties."""
    torch._dynamo.reset()
    known = len(k31compile.reports())
    with torch.no_grad():
        want = stable_eager(fn, *copies(args)) if stable else fn(*copies(args))
    with torch.no_grad():
        got = compiled(fn, **how)(*copies(args))
    return Run(got, want, k31compile.reports()[known:])


def copies(args):
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)


def assert_same_sets(got, want, count=None):
    """The same positions in each row, in any order."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert torch.equal(got.sort(-1).values, want.sort(-1).values)


def overlap(got, want):
    """The share of the positions of `want` that `got` holds, over all rows."""
    hits = (got.unsqueeze(-1) == want.unsqueeze(-2)).any(-1)
    return float(hits.double().mean())


def relative_error(got, want):
    """The largest difference against the largest value wanted."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-300))
