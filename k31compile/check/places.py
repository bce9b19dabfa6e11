"""How a check calls the modules of the user's model."""

from torch import fx

from k31compile.graph.source import module_path


def place_of(node: fx.Node) -> str:
    """The path of the module that made a node, as the user writes it: `model.layers.3.attn`."""
    return module_path(node).removeprefix("L.").removeprefix("self.")
