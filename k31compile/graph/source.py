"""Where in the user's model a node comes from."""

import re

from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def frames_of(node: fx.Node) -> list[tuple[str, int, str]]:
    """File, line and function of the user's frames that made `node`, the innermost last."""
    return _frames(node.meta.get("stack_trace") or "")


def source_line(node: fx.Node) -> str:
    """`file.py:line` of the innermost user frame that made `node`, or the node's name where nothing is known."""
    return line_of_trace(node.meta.get("stack_trace") or "") or f"node {node.name}"


def line_of_trace(trace: str) -> str:
    """`file.py:line` of the innermost frame of a stack trace; empty where it has none."""
    frames = _frames(trace)
    if not frames:
        return ""
    file, line, _ = frames[-1]
    short = "/".join(file.replace("\\", "/").split("/")[-2:])
    return f"{short}:{line}"


def _frames(trace: str) -> list[tuple[str, int, str]]:
    return [(file, int(line), function) for file, line, function in _FRAME.findall(trace)]


def module_path(node: fx.Node) -> str:
    """The qualified name of the innermost module that made `node`, e.g. `layers.3.indexer`; empty if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    return clean_path(str(list(stack.values())[-1][0]))


def clean_path(path: str) -> str:
    """`L['self'].layers['3'].mlp`, as Dynamo writes a module, as `layers.3.mlp`."""
    dotted = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path).strip(".")
    return dotted.removeprefix("L.").removeprefix("self").removeprefix(".")
