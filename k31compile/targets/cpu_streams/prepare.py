"""A graph as the dispatcher sees it, in which every view is a view and every write in place is written as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from k31compile.graph.sizes import value_of
from k31compile.targets.reinplace import reinplace_cache_writes


def prepare_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A captured graph of static sizes, ready to be scheduled; `module` is changed where cache writes go in place.

    What an operator is composed of is written out: `reshape` becomes a view or a copy, `narrow` a slice, so that it is
    known which nodes share memory.
    """
    reinplace_cache_writes(module)
    with FakeTensorMode(), torch.no_grad():
        inputs = tuple(_like(value_of(node)) for node in module.graph.find_nodes(op="placeholder"))
        run = fx.Interpreter(module, garbage_collect_values=False).run
        prepared = make_fx(run, tracing_mode="real")(*inputs)
    prepared.graph.eliminate_dead_code()
    prepared.recompile()
    return prepared


def _like(value: Any) -> Any:
    """A fake tensor of the mode that is active, as the value is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
