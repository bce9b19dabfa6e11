"""Which implementations an operator has, and which of them serves now.

A *provider* is one implementation of one operator. It says whether it can run on this machine (`available`) and
whether it takes these very arguments (`declines`); the first that does both serves the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _takes_everything(*_args: Any, **_kwargs: Any) -> str | None:
    return None


def _no_parts(*_args: Any, **_kwargs: Any) -> Mapping[str, int]:
    return {}


@dataclass(frozen=True)
class Provider:
    """One implementation: `run` has the operator's signature.

    `available()` returns (usable here, why); `declines(*args, **kwargs)` returns None, or the reason why these
    arguments should go to the next provider.
    """

    name: str
    available: Callable[[], tuple[bool, str]]
    run: Callable[..., Any]
    declines: Callable[..., str | None] = _takes_everything


@dataclass(frozen=True)
class Choice:
    """A provider's name and the sentence that says why it was chosen."""

    provider: str
    why: str


@dataclass(frozen=True)
class Operator:
    """An operator of the ``k31`` namespace; `reference` is its definition, `providers` end with it.

    `parts(*args, **kwargs)` counts the smaller operators whose work a call does. `is_for_cpu`: the CPU target alone
    puts it into graphs, no pass does, so no other target meets it.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    providers: tuple[Provider, ...]
    parts: Callable[..., Mapping[str, int]] = _no_parts
    is_for_cpu: bool = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Serve a CPU call by the first provider that is available and takes the arguments."""
        for provider in self.providers:
            if provider.available()[0] and provider.declines(*args, **kwargs) is None:
                return provider.run(*args, **kwargs)
        raise RuntimeError(f"no provider serves k31::{self.name}")

    def choose(self) -> Choice:
        """The provider that ordinary CPU calls get, and why the ones before it do not serve."""
        passed: list[str] = []
        for provider in self.providers:
            usable, why = provider.available()
            if usable:
                return Choice(provider.name, "; ".join([*passed, f"{provider.name}: {why}"]))
            passed.append(f"{provider.name} not used: {why}")
        raise RuntimeError(f"no provider serves k31::{self.name}")


OPERATORS: dict[str, Operator] = {}


def provider_for(name: str) -> Choice:
    """Which provider serves ``k31::<name>`` on this machine's CPU, and why. Raises KeyError on an unknown name."""
    if name not in OPERATORS:
        raise KeyError(f"no operator k31::{name}; known: {', '.join(sorted(OPERATORS))}")
    return OPERATORS[name].choose()
