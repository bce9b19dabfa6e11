"""torchair's configuration of a GE graph, and the options that GE is given with it; needs an open torchair."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


def ge_config() -> Any:
    """torchair's CompilerConfig: weights do not move, and the operators of one stream stay in the order of the graph.

    No edge of data leads from who reads a cache to who writes it next: in GE's own order, depth first, the write may
    come first.
    """
    from torchair.configs.compiler_config import CompilerConfig

    config = CompilerConfig()
    config.experimental_config.frozen_parameter = True
    config.experimental_config.topology_sorting_strategy = "StableRDFS"
    return config


def ge_options() -> dict[str, Any]:
    """The options by torchair's own lists: for compiling and for running, each global, per session and per graph."""
    from torchair._ge_concrete_graph.fx2ge_converter import _generate_export_options_config

    for_graph, for_all = ge_config().as_dict()
    with tempfile.TemporaryDirectory() as folder:
        _generate_export_options_config(for_graph, for_all, folder)
        read: dict[str, Any] = json.loads((Path(folder) / "options.json").read_text(encoding="utf-8"))
    return read
