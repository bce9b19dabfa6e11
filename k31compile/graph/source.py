"""Where in the user's model a node comes from."""

import re

from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def frames_of(node: fx.Node) -> list[tuple[str, int, str]]:
    """File, line and function of the user's frames that made `node`, the innermost last."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    return [(file, int(line), function) for file, line, function in found]


def source_line(node: fx.Node) -> str:
    """`file.py:line` of the innermost user frame that made `node`, or the node's name where nothing is known."""
    frames = frames_of(node)
    if not frames:
        return f"node {node.name}"
    file, line, _ = frames[-1]
    short = "/".join(file.replace("\\", "/").split("/")[-2:])
    return f"{short}:{line}"


def module_path(node: fx.Node) -> str:
    """The qualified name of the innermost module that made `node`, e.g. `layers.3.indexer`; empty if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", str(list(stack.values())[-1][0])).strip(".")
    return path.removeprefix("L.").removeprefix("self").removeprefix(".")
