"""GE's operator definitions as torchair's wheel carries them: names and kinds of inputs, outputs and attributes.

Two sources in one generated file of torchair: comments with GE's REG_OP declarations, and calls that build an IrDef.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_DECLARATION = re.compile(r"REG_OP\((\w+)\)(.*?)\"\"\"", re.DOTALL)
_FIELD = re.compile(
    r"\.(INPUT|OPTIONAL_INPUT|DYNAMIC_INPUT|OUTPUT|DYNAMIC_OUTPUT|ATTR|REQUIRED_ATTR)\(\s*(\w+)\s*(?:,\s*(\w+))?"
)
_BUILT = re.compile(r'IrDef\("(\w+)"\)((?:\s*\\?\s*\.\w+\((?:[^()]|\([^()]*\))*\))*)')
_STEP = re.compile(r'\.(optional_|dynamic_|required_|)(input|output|attr)\(\s*"(\w+)"(?:,\s*attr\.(\w+))?')
_KINDS = {"INPUT": "required", "OPTIONAL_INPUT": "optional", "DYNAMIC_INPUT": "dynamic"}
_TYPES = {"ListInt": "LIST_INT", "ListFloat": "LIST_FLOAT", "ListBool": "LIST_BOOL", "Type": "DATA_TYPE"}


@dataclass
class Definition:
    """One GE operator: (name, kind) of inputs and outputs, (name, type) of attributes, in their order."""

    inputs: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[tuple[str, str]] = field(default_factory=list)
    attributes: list[tuple[str, str]] = field(default_factory=list)

    def line(self, name: str) -> str:
        """The definition in one line, as the stub library reads it."""
        parts = [f"in:{one}:{kind}" for one, kind in self.inputs]
        parts += [f"out:{one}:{kind}" for one, kind in self.outputs]
        parts += [f"attr:{one}:{kind}" for one, kind in self.attributes]
        return "|".join([name, *parts])


def read_definitions(torchair: Path) -> dict[str, Definition]:
    """Every definition in the installed torchair, by the operator's name."""
    text = (torchair / "_ge_concrete_graph" / "auto_generated_ge_raw_ops.py").read_text(encoding="utf-8")
    return {**dict(_declared(text)), **dict(_built(text))}


def _declared(text: str) -> Iterator[tuple[str, Definition]]:
    for name, body in _DECLARATION.findall(text):
        found = Definition()
        for kind, one, type_name in _FIELD.findall(body):
            if kind in _KINDS:
                found.inputs.append((one, _KINDS[kind]))
            elif kind.endswith("OUTPUT"):
                found.outputs.append((one, "required" if kind == "OUTPUT" else "dynamic"))
            else:
                found.attributes.append((one, f"VT_{_TYPES.get(type_name, type_name.upper())}"))
        yield name, found


def _built(text: str) -> Iterator[tuple[str, Definition]]:
    for name, chain in _BUILT.findall(text):
        found = Definition()
        for kind, what, one, type_name in _STEP.findall(chain):
            if what == "input":
                found.inputs.append((one, kind.rstrip("_") or "required"))
            elif what == "output":
                found.outputs.append((one, "dynamic" if kind == "dynamic_" else "required"))
            else:
                found.attributes.append((one, f"VT_{type_name.upper()}"))
        yield name, found
