"""The one ``k31`` operator library, and how an operator enters it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
) -> Operator:
    """Define ``k31::<schema>`` with its fake and its reference, and list it in `OPERATORS`.

    `providers` stand in order of preference; the reference serves whatever they decline. Tensors that are not on
    the CPU go to the reference directly. `parts` counts the smaller operators whose work a call does; none without
    it. Raises ValueError when the name is taken.
    """
    name = schema.partition("(")[0].strip()
    if name in OPERATORS:
        raise ValueError(f"operator k31::{name} is defined twice")
    operator = Operator(name, schema, reference, (*providers, reference_provider(reference)))
    operator = operator if parts is None else replace(operator, parts=parts)
    # pt2_compliant: fake and real agree (the suite runs opcheck on each operator).
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"k31::{name}", fake, lib=LIBRARY)
    # One kernel for all devices: that of the CPU comes from the built library, once it is loaded, and passes on to
    # this one what it does not serve (cpu/torch_calls.cpp).
    LIBRARY.impl(name, _by_device(operator), "CompositeExplicitAutograd")
    OPERATORS[name] = operator
    return operator


def _by_device(operator: Operator) -> Callable[..., Any]:
    """The operator's kernel for all devices: its providers on the CPU, its reference elsewhere."""

    def run(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if isinstance(args[0], list) else args[:1]
        on_cpu = all(tensor.is_cpu for tensor in first)
        return (operator.run if on_cpu else operator.reference)(*args, **kwargs)

    return run


def reference_provider(reference: Callable[..., Any]) -> Provider:
    """The provider that every operator ends with: the definition itself, available everywhere."""
    return Provider("reference", lambda: (True, "plain torch, always there"), reference)
