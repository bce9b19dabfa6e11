"""Regions of small programs: between the inputs and the results, or from named operators on."""

from k31compile.graph.region import Region


def whole(captured):
    """The region from the tensor inputs to the results."""
    flow = captured.flow
    leaves = [n for n in captured.module.graph.find_nodes(op="placeholder") if n not in flow.constants]
    return Region.between(flow, leaves, [n for n in captured.outputs if n is not None])


def hash_of(captured):
    return whole(captured).canonical_hash
