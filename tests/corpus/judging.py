"""Call a program of the corpus and hold what it gives against its operator's definition."""

from functools import cache

import torch
from definitions import DEFINITIONS
from operands import lay, make, operands, rounded
from wide import Wide

# A result that may be listed in any order by itself.
SET = "chosen_any"
# Results that may be listed in any order: they are compared as one weight for each expert.
UNORDERED = {"experts", "weights"}


def run(program, length, seed, dtype=torch.float64):
    """What `program` returns, and what it leaves in the arguments that it writes: by result name."""
    arguments = operands(program, length, dtype, seed)
    with Wide() if dtype == torch.float64 else torch.no_grad():
        returned = program.fn(*arguments)
    returned = returned if isinstance(returned, tuple) else (returned,)
    got = dict(zip(program.results, returned, strict=True))
    written = dict(zip(program.arguments, arguments, strict=True))
    return got | {result: written[name] for name, result in program.updates.items()}


def expect(program, length, seed, dtype=torch.float64):
    """The same results from the operator's definition, of the very numbers that `dtype` holds, in float64."""
    defined = _defined(program.operator, tuple(sorted(program.options.items())), length, seed, dtype)
    return {name: lay(defined, name) for name in (*program.results, *program.updates.values())}


@cache
def _defined(operator, options, length, seed, dtype):
    made = rounded(make(operator, length, seed), dtype)
    made = {name: x.double() if _is_float(x) else x for name, x in made.items()}
    return DEFINITIONS[operator](made, **dict(options))


def difference(got, want):
    """The largest difference over all results, each against its own largest value; infinite if a shape differs."""
    if want.keys() >= UNORDERED:
        got, want = as_spread(got), as_spread(want)
    if SET in want:
        got, want = (results | {SET: results[SET].sort(-1).values} for results in (got, want))
    return max(_relative(got[name], want[name]) for name in want)


def as_spread(results):
    """Experts and their weights, in whatever order, as one row of weights for each token."""
    experts, weights = results["experts"].long(), results["weights"]
    rest = {name: x for name, x in results.items() if name not in UNORDERED}
    return rest | {"spread": weights.new_zeros(experts.shape[0], 64).scatter(-1, experts, weights)}


def _relative(got, want):
    if got.shape != want.shape:
        return float("inf")
    error = (got.double() - want).abs().max() / want.abs().max().double().clamp_min(1e-300)
    return float("inf") if error.isnan() else float(error)


def _is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()
