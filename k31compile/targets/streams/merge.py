"""A super kernel on the CPU: its part of the graph, compiled by Inductor into one call."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx

from k31compile.targets.streams.parts import Part


def compile_part(part: Part) -> Part:
    """The part with a compiled call; what it writes in place is written in place by that too.

    Inductor takes inputs of a graph to be apart. Where a call gives memory that is written a second time under another
    name, the part runs operator by operator, as it is written. Random numbers are those of the operators themselves:
    Inductor's own generator gives others.
    """
    module = copy.deepcopy(part.module)
    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with torch.no_grad(), inductor_config.patch(fallback_random=True):
        compiled: Any = compile_fx(module, examples)
    return replace(part, run=_guarded(part.module, compiled, part.written) if part.written else compiled)


def _guarded(module: fx.GraphModule, compiled: Any, written: tuple[int, ...]) -> Any:
    def run(*inputs: Any) -> Any:
        storages = [value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor)]
        changed = [inputs[place].untyped_storage().data_ptr() for place in written]
        if any(storages.count(storage) > 1 for storage in changed):
            return module.forward(*inputs)
        return compiled(*inputs)

    return run
