"""The key of a compiled graph: named ingredients, each plain text or a digest, and the hash over all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from k31compile.cache.canonical import Digest, write_graph_text, write_hint_text, write_input_text
from k31compile.cache.surroundings import describe_surroundings
from k31compile.options import Options

_NOT_IN_KEY = ("cache", "codegen", "lock", "require_warm")
"""Options that say where a graph is kept, who builds it or what is asked of a report, not what is built."""


@dataclass(frozen=True)
class Key:
    """What a compiled graph is found by.

    Attributes:
        ingredients: name -> text; two keys that are equal in all of them are one.
        graph_text: the graph that the ingredient `graph` is the digest of.
        hints: the numbers of dynamic sizes at this call.

    """

    ingredients: Mapping[str, str]
    graph_text: str = ""
    hints: str = ""

    @property
    def digest(self) -> str:
        """64 hexadecimal digits."""
        return _sha256(json.dumps(dict(self.ingredients), sort_keys=True, separators=(",", ":")))

    def with_hints(self) -> Key:
        """The key under which a graph is kept that serves only sizes like those of this call."""
        return Key({**self.ingredients, "hints": self.hints}, self.graph_text, self.hints)


def make_key(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, target: str, digest_of: Digest
) -> Key:
    """The key of a graph as Dynamo gives it, under these options and as torch is set now.

    Raises:
        KeyingError: what the graph does may change without any ingredient changing; it must not be kept.
    """
    text = write_graph_text(module, digest_of)
    chosen = {name: value for name, value in options.to_dict().items() if name not in _NOT_IN_KEY}
    ingredients = {
        "graph": _sha256(text),
        "inputs": write_input_text(module, example_inputs),
        "options": json.dumps({**chosen, "target": target}, sort_keys=True),
        **describe_surroundings(target),
    }
    return Key(ingredients, text, write_hint_text(module, example_inputs))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
