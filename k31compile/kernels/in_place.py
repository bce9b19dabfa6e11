"""In-place forms of the operators that carry a state: ``k31::NAME_`` reads a state and leaves the next one there.

A step of decode reads the state once and writes it once, where the functional operator writes to new memory that is
then copied back. `rows` names which states of a pool are meant, so that nothing is gathered and put back either.
They stand for the functional operators in what a target builds, never in a graph that passes see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from k31compile.kernels.library import LIBRARY, register_kernel
from k31compile.kernels.registry import Operator, Provider

IN_PLACE: dict[str, Callable[..., Any]] = {}
"""What serves each in-place form on the CPU where the built library does not."""


def register_in_place_form(
    operator: Operator, schema: str, state: int, fake: Callable[..., Any], providers: tuple[Provider, ...]
) -> None:
    """Define the in-place form of an operator whose argument `state`, by position, and last result are states.

    Args:
        schema: `NAME_(...)` with the operator's arguments in their order, the state mutable, and `rows` by name.
        fake: the shapes and dtypes of all results but the last state.
        providers: tried in their order; what they decline the functional operator serves, and the state is copied.
    """
    name = schema.partition("(")[0]

    def by_copy(functional: Callable[..., Any], *args: Any, rows: torch.Tensor | None = None, **options: Any) -> Any:
        pool = args[state]
        before = pool if rows is None else pool[rows]
        *results, last = functional(*args[:state], before, *args[state + 1 :], **options)
        if rows is None:
            pool.copy_(last)
        else:
            pool[rows] = last.to(pool.dtype)
        return results[0] if len(results) == 1 else tuple(results)

    def run(*args: Any, **options: Any) -> Any:
        for provider in providers:
            if provider.available()[0] and provider.declines(*args, **options) is None:
                return provider.run(*args, **options)
        return by_copy(operator.run, *args, **options)

    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"k31::{name}", fake, lib=LIBRARY)
    register_kernel(name, run, functools.partial(by_copy, operator.reference))
    IN_PLACE[name] = run
