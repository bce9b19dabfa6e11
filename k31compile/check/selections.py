"""Which choice of the graph as written each fused indexer stands for, and how good its selection is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from k31compile.check.distance import filled_up, overlap, regret
from k31compile.check.interpret import ATEN, Call, Gold
from k31compile.check.places import place_of
from k31compile.check.result import Stage, judged
from k31compile.kernels import paging

INDEXER = "k31.lightning_indexer.default"
ROUTER = "k31.moe_gating_top_k.default"


def pair(traced: fx.GraphModule, survivors: Mapping[str, str], calls: Sequence[Call]) -> dict[str, Call]:
    """The top-k nodes that fusion took away -> the indexer or router in their place, matched by module and order.

    A router may have chosen groups before it chose experts: the experts come last.
    """
    gone: dict[str, list[str]] = defaultdict(list)
    for node in traced.graph.find_nodes(op="call_function", target=ATEN.topk.default):
        if node.name not in survivors:
            gone[place_of(node)].append(node.name)
    paired: dict[str, Call] = {}
    for call in calls:
        names = gone.get(place_of(call.node))
        if str(call.node.target) in (INDEXER, ROUTER) and names:
            paired[names.pop(0 if str(call.node.target) == INDEXER else -1)] = call
    return paired


def as_choice(call: Call, like: torch.Tensor) -> torch.Tensor | None:
    """What an operator chose in the shape of the top-k's indices, or None where it has no such shape.

    Of a router its experts int32 [N, k]. Of an indexer int32 [B, T, 1, K]; empty slots name keys that the row does not
    see, as a top-k of masked scores does.
    """
    if str(call.node.target) == ROUTER:
        experts: torch.Tensor = call.result[1]
        return experts.long().reshape(like.shape) if experts.numel() == like.numel() else None
    positions = paging.positions(call.args[1], call.kwargs.get("block_table"))
    width = like.shape[-1]
    rows = call.result.reshape(-1, call.result.shape[-1])[:, :width].long()
    if rows.numel() != like.numel():
        return None
    return filled_up(rows, positions).reshape(like.shape)


def selection_stages(
    gold_eager: Gold, gold_k31: Gold, paired: Mapping[str, Call], forced: Mapping[str, torch.Tensor]
) -> dict[str, Stage]:
    """One stage per fused indexer or router, under the name of the top-k that it replaced.

    Its error is by how much the run's selection is worse than the best one in float64.
    """
    stages: dict[str, Stage] = {}
    for name, call in paired.items():
        where = place_of(call.node) or call.node.name
        if name not in forced:
            stages[name] = Stage(where, "selection", 0.0, 0.0, 0.0, None, "shape unknown: not judged")
            continue
        errors, chosen = [], []
        for gold in (gold_eager, gold_k31):
            scores = gold.scores[name]
            picked = gold.forced[name].reshape(-1, gold.forced[name].shape[-1])
            errors.append(regret(scores.reshape(-1, scores.shape[-1]), picked))
            chosen.append(picked)
        flat = gold_k31.scores[name].reshape(-1, gold_k31.scores[name].shape[-1])
        share = overlap(chosen[1], chosen[0], flat.shape[-1], hidden=flat == -torch.inf)
        # A router's logits are wide whatever the stream is that they were made from.
        dtype = call.args[0].dtype if str(call.node.target) == INDEXER else _coarsest(gold_k31.module)
        note = "" if share == 1 else "equal or nearly equal scores were chosen differently"
        stages[name] = judged(where, "selection", errors[0], errors[1], dtype, share, note)
    return stages


def _coarsest(module: torch.nn.Module) -> torch.dtype:
    """The floating dtype with the fewest digits among a graph's inputs."""
    assert isinstance(module, fx.GraphModule)
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    found = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
