"""One graph, run as written in float64 and in its own dtype and as rewritten, compared where both still meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from k31compile.check.distance import relative_error
from k31compile.check.interpret import Gold, Recorder, mutated, own_inputs
from k31compile.check.operators import operator_stages
from k31compile.check.places import place_of
from k31compile.check.result import Stage, judged
from k31compile.check.selections import as_choice, pair, selection_stages
from k31compile.graph.evaluate import raised
from k31compile.options import Options
from k31compile.passes.pipeline import copy_module
from k31compile.targets.cpu import compile_for_cpu


def compare_graph(
    traced: fx.GraphModule, rewritten: fx.GraphModule, inputs: Sequence[Any], mark: str
) -> tuple[Any, list[Stage]]:
    """Return the outputs as written, applied to `inputs` as the graph does, and the stages."""
    survivors = {node.meta[mark]: node.name for node in rewritten.graph.nodes if mark in node.meta}
    places = _meeting_points(traced, survivors)
    wanted = {name for names in places.values() for name in names} | set(mutated(traced).values())

    k31 = Recorder(
        rewritten, {survivors[name] for name in wanted if name in survivors} | set(mutated(rewritten).values())
    )
    k31_outputs = k31.run(*own_inputs(rewritten, inputs))
    eager = Recorder(traced, wanted)
    eager_outputs = eager.run(*own_inputs(traced, inputs))

    paired = pair(traced, survivors, k31.calls)
    forced = _choices_of(k31, eager, paired, survivors)
    golds = [Gold(traced, wanted, eager.choices), Gold(traced, wanted, forced)]
    gold_outputs = [gold.run(*_raised_inputs(traced, inputs)) for gold in golds]

    selections = selection_stages(golds[0], golds[1], paired, forced)
    stages = _in_order(traced, places, survivors, eager, k31, golds, selections)
    stages += operator_stages(k31.calls)
    stages += _cache_stages(traced, rewritten, eager, k31, golds)
    errors = [_worst(outputs, gold) for outputs, gold in zip((eager_outputs, k31_outputs), gold_outputs, strict=True)]
    dtype = _dtype_of(eager_outputs)
    stages.append(judged("of the graph", "output", errors[0], errors[1], dtype, None, _unforced(paired, forced)))
    stages.append(_compiled_stage(rewritten, inputs, gold_outputs[1], errors[0], dtype))
    return traced.forward(*inputs), stages


def _meeting_points(traced: fx.GraphModule, survivors: Mapping[str, str]) -> dict[str, list[str]]:
    """Per module the floating values that leave it and that both graphs compute."""
    places: dict[str, list[str]] = {}
    for node in traced.graph.nodes:
        path, value = place_of(node), node.meta.get("val")
        if node.op != "call_function" or not path or node.name not in survivors:
            continue
        if isinstance(value, torch.Tensor) and value.is_floating_point() and any(_outside(u, path) for u in node.users):
            places.setdefault(path, []).append(node.name)
    return places


def _outside(user: fx.Node, path: str) -> bool:
    other = place_of(user)
    return other != path and not other.startswith(f"{path}.")


def _choices_of(
    k31: Recorder, eager: Recorder, paired: Mapping[str, Any], survivors: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The choices of the rewritten run under the names of the graph as written."""
    forced = {name: k31.choices[survivors[name]] for name in eager.choices if survivors.get(name) in k31.choices}
    for name, call in paired.items():
        choice = as_choice(call, eager.choices[name])
        if choice is not None:
            forced[name] = choice
    return forced


def _unforced(paired: Mapping[str, Any], forced: Mapping[str, Any]) -> str:
    missing = sum(name not in forced for name in paired)
    return f"{missing} selections could not be imposed on the float64 run" if missing else ""


def _raised_inputs(traced: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    return [
        new.clone() if isinstance(new, torch.Tensor) and new is old else new
        for new, old in zip(raised(own_inputs(traced, inputs)), inputs, strict=True)
    ]


def _in_order(
    traced: fx.GraphModule,
    places: Mapping[str, list[str]],
    survivors: Mapping[str, str],
    eager: Recorder,
    k31: Recorder,
    golds: Sequence[Gold],
    selections: Mapping[str, Stage],
) -> list[Stage]:
    """Modules and selections in the order in which the graph computes them: the first wrong one is the cause."""
    position = {node.name: at for at, node in enumerate(traced.graph.nodes)}
    ordered: list[tuple[int, Stage]] = []
    for path, names in places.items():
        left = max(relative_error(eager.values[name], golds[0].values[name]) for name in names)
        right = max(relative_error(k31.values[survivors[name]], golds[1].values[name]) for name in names)
        dtype = eager.values[names[0]].dtype
        ordered.append((max(position[name] for name in names), judged(path, "module", left, right, dtype)))
    ordered.extend((position[name], stage) for name, stage in selections.items())
    return [stage for _, stage in sorted(ordered, key=lambda item: item[0])]


def _cache_stages(
    traced: fx.GraphModule, rewritten: fx.GraphModule, eager: Recorder, k31: Recorder, golds: Sequence[Gold]
) -> list[Stage]:
    """One stage per input that the graph overwrites."""
    theirs = mutated(rewritten)
    names = {
        node.name: str(node.meta.get("source_name", node.name)) for node in traced.graph.find_nodes(op="placeholder")
    }
    stages: list[Stage] = []
    for place, value in mutated(traced).items():
        plain, gold = eager.values[value], [run.values[value] for run in golds]
        if not plain.is_floating_point():
            continue
        got = k31.values.get(theirs.get(place, ""))
        error = float("inf") if got is None else relative_error(got, gold[1])
        stages.append(
            judged(
                names[place].removeprefix("l_").strip("_"), "cache", relative_error(plain, gold[0]), error, plain.dtype
            )
        )
    return stages


def _worst(outputs: Any, golds: Any) -> float:
    pairs = zip(_floats(outputs), _floats(golds), strict=True)
    return max((relative_error(got, gold) for got, gold in pairs), default=0.0)


def _floats(outputs: Any) -> list[torch.Tensor]:
    found = outputs if isinstance(outputs, list | tuple) else [outputs]
    return [value for value in found if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _dtype_of(outputs: Any) -> torch.dtype:
    return next((value.dtype for value in _floats(outputs)), torch.float32)


def _compiled_stage(
    rewritten: fx.GraphModule, inputs: Sequence[Any], gold: Any, eager: float, dtype: torch.dtype
) -> Stage:
    """The callable that codegen="ops" makes of the rewritten graph, cache writes in place."""
    compiled = compile_for_cpu(copy_module(rewritten), inputs, Options(codegen="ops"))
    outputs = compiled(*own_inputs(rewritten, inputs))
    return judged("what target cpu runs (codegen='ops')", "compiled", eager, _worst(outputs, gold), dtype)
