"""Keys of small programs, for the tests of what is in them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from k31compile.cache.key import Key, make_key
from k31compile.keeping import _digest
from k31compile.options import Options


def key_of(program: Callable[..., Any], *args: Any, dynamic: bool = False, **options: Any) -> Key:
    """The key of the one graph of a call."""
    found: list[Key] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(make_key(module, inputs, Options(**options), "cpu", _digest))
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    (key,) = found
    return key


def differing(one: Key, other: Key) -> set[str]:
    assert (one.digest == other.digest) == (one.ingredients == other.ingredients)
    return {name for name in one.ingredients if one.ingredients[name] != other.ingredients[name]}


def draw(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(dtype)
