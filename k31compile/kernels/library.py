"""The one ``k31`` operator library, and how an operator enters it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from k31compile.kernels.registry import OPERATORS, Operator, Provider

# Library.define instead of @custom_op: the latter costs ten times more per call, which decode would notice.
LIBRARY = torch.library.Library("k31", "DEF")


def register_operator(
    schema: str,
    *,
    fake: Callable[..., Any],
    reference: Callable[..., Any],
    providers: tuple[Provider, ...] = (),
    parts: Callable[..., Mapping[str, int]] | None = None,
    is_for_cpu: bool = False,
) -> Operator:
    """Define ``k31::<schema>`` with its fake and its reference, and list it in `OPERATORS`.

    `providers` stand in order of preference; the reference serves whatever they decline. Tensors that are not on
    the CPU go to the reference directly. `parts` counts the smaller operators whose work a call does; none without
    it. `is_for_cpu` is that of `Operator`. Raises ValueError when the name is taken.
    """
    name = schema.partition("(")[0].strip()
    if name in OPERATORS:
        raise ValueError(f"operator k31::{name} is defined twice")
    operator = Operator(name, schema, reference, (*providers, reference_provider(reference)), is_for_cpu=is_for_cpu)
    operator = operator if parts is None else replace(operator, parts=parts)
    # pt2_compliant: fake and real agree (the suite runs opcheck on each operator).
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"k31::{name}", fake, lib=LIBRARY)
    register_kernel(name, operator.run, reference)
    OPERATORS[name] = operator
    return operator


def register_kernel(name: str, on_cpu: Callable[..., Any], elsewhere: Callable[..., Any]) -> None:
    """Serve ``k31::<name>`` by one function where all tensors are on the CPU and by another elsewhere.

    To torch both are one kernel for all devices. That of the CPU alone comes from the built library, once it is loaded,
    and passes on to this one what it does not serve (cpu/torch_calls.cpp).
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return (on_cpu if _are_on_cpu(args) else elsewhere)(*args, **kwargs)

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")


def _are_on_cpu(args: Iterable[Any]) -> bool:
    return all(
        arg.is_cpu if isinstance(arg, torch.Tensor) else not isinstance(arg, list) or _are_on_cpu(arg) for arg in args
    )


def reference_provider(reference: Callable[..., Any]) -> Provider:
    """The provider that every operator ends with: the definition itself, available everywhere."""
    return Provider("reference", lambda: (True, "plain torch, always there"), reference)
