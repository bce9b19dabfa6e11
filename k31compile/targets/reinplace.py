"""Turn cache writes back into writes in place, for a graph that runs operator by operator.

A functional graph updates a cache by making a new one and copying it back at the end. Inductor undoes that by itself;
without it every decode step would copy whole caches.
"""

from collections.abc import Sequence

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.named_regions import LABEL
from k31compile.graph.rewrite import same_strides
from k31compile.graph.sizes import value_of
from k31compile.graph.views import COPIES, is_view, may_alias

_IN_PLACE = {
    ATEN.index_put.default: ATEN.index_put_.default,
    ATEN.index_copy.default: ATEN.index_copy_.default,
    ATEN.scatter.src: ATEN.scatter_.src,
    ATEN.scatter.value: ATEN.scatter_.value,
}
_OF_A_PART = {ATEN.slice_scatter.default: ATEN.slice.Tensor, ATEN.select_scatter.default: ATEN.select.int}


def reinplace_cache_writes(module: fx.GraphModule) -> int:
    """Replace functional writes to mutated inputs by writes in place, and return how many final copies went away.

    A write is replaced where nobody reads the old value after it.
    """
    removed = 0
    graph = module.graph
    # One index for all caches: what is put in stands where the write stood, and shares memory with its cache alone.
    flow = Dataflow(graph)
    for copy in graph.find_nodes(op="call_function", target=ATEN.copy_.default):
        target, source = copy.args[0], copy.args[1]
        writes = _write_chain(source, target)
        if writes is None:
            continue
        steps, left_out = _unfolded(writes)
        if not all(_old_value_is_dead(flow, step, left_out) for step in steps) or _is_read_late(flow, steps, left_out):
            continue
        for step in steps:
            _write_in_place(flow, step)
        for write in left_out:
            # What was written inside of it is a part of the cache itself.
            write.replace_all_uses_with(write.args[0])  # type: ignore[arg-type]
            graph.erase_node(write)
        # What read the updated input, as an output or a view of it, reads the input itself.
        copy.replace_all_uses_with(target)
        graph.erase_node(copy)
        removed += 1
    module.recompile()
    return removed


def _write_chain(node: fx.Node, target: fx.Node) -> list[fx.Node] | None:
    """The writes between an input and its final value, or None where something else happens to it."""
    writes: list[fx.Node] = []
    if not same_strides(value_of(node), value_of(target)):
        # Transposed on the way: the same memory would hold other elements.
        return None
    while node is not target:
        if node.target in _IN_PLACE or node.target in _OF_A_PART:
            writes.append(node)
        elif not is_view(node) or node.target in COPIES:
            return None
        if not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return writes[::-1] if writes else None


def _unfolded(writes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The innermost writes in their order, and the ones around them that put a part back where it was taken."""
    steps: list[fx.Node] = []
    left_out: list[fx.Node] = []
    for write in writes:
        inside = _inside(write)
        if inside:
            inner_steps, inner_left_out = _unfolded(inside)
            steps += inner_steps
            left_out += [*inner_left_out, write]
        else:
            steps.append(write)
    return steps, left_out


def _inside(write: fx.Node) -> list[fx.Node]:
    """The writes into a part of a cache, if all that is put back at that part is the part after them; else none."""
    if write.target not in _OF_A_PART:
        return []
    cache, node, *where = write.args
    writes: list[fx.Node] = []
    while isinstance(node, fx.Node):
        if node.target is _OF_A_PART[write.target] and node.args[0] is cache and list(node.args[1:]) == where:
            return writes[::-1]
        if node.target in _IN_PLACE or node.target in _OF_A_PART:
            writes.append(node)
        elif not is_view(node) or node.target in COPIES:
            return []
        node = node.args[0]
    return []


def _is_read_late(flow: Dataflow, steps: Sequence[fx.Node], left_out: Sequence[fx.Node]) -> bool:
    """Whether a part that was put back is read by itself after the next write: by then the cache may hold another."""
    places = sorted(flow.position[step] for step in steps)
    for write in left_out:
        later = [place for place in places if place > flow.position[write]]
        part = _aliases(flow, write.args[1])  # type: ignore[arg-type]
        if later and any(flow.position[user] > later[0] for alias in part for user in alias.users):
            return True
    return False


def _old_value_is_dead(flow: Dataflow, write: fx.Node, left_out: Sequence[fx.Node]) -> bool:
    """Whether nobody reads what a write writes over; those that are left out put back what is there."""
    aliases = _aliases(flow, write.args[0])  # type: ignore[arg-type]
    here = flow.position[write]
    return all(
        flow.position[user] <= here or user in aliases or user in left_out or user.target is ATEN.copy_.default
        for alias in aliases
        for user in alias.users
    )


def _aliases(flow: Dataflow, node: fx.Node) -> set[fx.Node]:
    """Everything that shares memory with `node` by views, up to the write or input that made it."""
    while is_view(node) and node.target not in COPIES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    aliases, todo = set[fx.Node](), [node]
    while todo:
        alias = todo.pop()
        aliases.add(alias)
        todo += [user for user in flow.users[alias] if may_alias(user) and user not in aliases]
    return aliases


def _write_in_place(flow: Dataflow, write: fx.Node) -> None:
    graph = flow.graph
    if write.target in _IN_PLACE:
        write.target = _IN_PLACE[write.target]
        return
    destination, source, *where = write.args
    with graph.inserting_before(write):
        part = graph.call_function(_OF_A_PART[write.target], (destination, *where))  # type: ignore[index]
        copied = graph.call_function(ATEN.copy_.default, (part, source))
    flow.position[part] = flow.position[copied] = flow.position[write]
    if LABEL in write.meta:
        part.meta[LABEL] = copied.meta[LABEL] = write.meta[LABEL]
    write.replace_all_uses_with(destination)  # type: ignore[arg-type]
    graph.erase_node(write)
