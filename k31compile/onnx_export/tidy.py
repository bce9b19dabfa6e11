"""What a reader of an ONNX graph sees of each node: its place in the model and its line of code, no more.

torch's exporter writes pages on each node, with the folders of this machine; they are left out.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from k31compile.graph.source import clean_path, line_of_trace

if TYPE_CHECKING:
    from k31compile.onnx_export.program import Call

_TRACE, _SCOPES = "pkg.torch.onnx.stack_trace", "pkg.torch.onnx.name_scopes"
_CALL = "call"


def tidy_nodes(graph: Any, calls: Sequence[Call]) -> None:
    """Give each k31 call its function's overload and a name; leave module and source line on every node."""
    seen: Counter[str] = Counter()
    for node in graph.all_nodes():
        kept = {"module": _module(node), "source": line_of_trace(node.metadata_props.get(_TRACE, ""))}
        if _CALL in node.metadata_props:
            call = calls[int(node.metadata_props[_CALL])]
            kept = {"module": call.module, "source": call.source}
            node.overload = call.kind.overload
            name = f"{call.module}.{call.kind.operator}".lstrip(".")
            seen[name] += 1
            node.name = name if seen[name] == 1 else f"{name}_{seen[name]}"
        clear_node(node)
        node.metadata_props.update({key: text for key, text in kept.items() if text})
    for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
        value.metadata_props.clear()


def clear_node(node: Any) -> None:
    """Take away everything that the exporter said about a node and its results."""
    node.metadata_props.clear()
    node.doc_string = None
    for value in node.outputs:
        value.metadata_props.clear()


def _module(node: Any) -> str:
    """The path of the innermost module: the exporter lists all around a node, then the node itself."""
    text = node.metadata_props.get(_SCOPES, "")
    if not re.fullmatch(r"\[.*\]", text, re.DOTALL):
        return ""
    scopes = [scope for scope in ast.literal_eval(text)[:-1] if scope]
    return clean_path(scopes[-1]) if scopes else ""
