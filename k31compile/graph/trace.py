"""From Dynamo's graph to pure data flow: pre-dispatch ATen, functionalised, with mutations as final copies.

One spelling per operator, composite operators (einsum, linear, matmul, softmax, topk) still whole. Without
functionalisation a reader does not depend on the in-place write that it sees, and no cut of the graph is sound.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from k31compile.errors import TraceError
from k31compile.graph.views import COPIES, is_view

ATEN = torch.ops.aten

# They assert and nothing else, yet count as users of the values that they look at.
_ASSERTS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


def current_fake_mode() -> FakeTensorMode:
    """The fake mode of the trace under way, or a new one outside a compile."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_inputs(example_inputs: Sequence[Any], fake_mode: FakeTensorMode) -> list[Any]:
    """Example inputs as tensors of `fake_mode`; its memo gives each real tensor the same fake one every time."""
    return [
        fake_mode.from_tensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) else value
        for value in example_inputs
    ]


def trace_functional(module: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Trace `module` to a functional pre-dispatch ATen graph whose mutations of inputs are final `copy_` nodes.

    Every node carries `meta["val"]` (a fake tensor, or a SymInt) and the user's stack trace. Symbolic sizes stay
    symbolic and get no new guard.

    Raises:
        TraceError: torch could not trace the graph; the cause is chained.
    """
    fake_mode = current_fake_mode()
    inputs = fake_inputs(example_inputs, fake_mode)
    aliases: set[int] = set()
    try:
        with fake_mode, enable_python_dispatcher(), _quiet(), _plain_grad_state():
            program = _functional(module, aliases)
            tracer = make_fx(program, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)
            traced = tracer(*inputs)
    except Exception as error:
        raise TraceError(
            f"the graph could not be traced functionally: {type(error).__name__}: {str(error).splitlines()[0]}",
            hint="the graph goes to Inductor as it is; please report it with the model's code",
        ) from error
    _mark_inputs(traced, module, example_inputs)
    _refuse_shared_inputs(traced, example_inputs)
    _return_inputs_themselves(traced, aliases)
    _specialise_floats(traced)
    drop_asserts(traced)
    return traced


def _specialise_floats(module: fx.GraphModule) -> None:
    """Make float inputs the numbers that they are, with a guard: under dynamic=True a scale arrives as a symbol."""
    for node in list(module.graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.SymFloat) and node.op == "call_function":
            node.replace_all_uses_with(float(value))
            module.graph.erase_node(node)


def drop_asserts(module: fx.GraphModule) -> None:
    """Erase assertion nodes, then what nobody uses."""
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and node.target in _ASSERTS and not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _functional(module: fx.GraphModule, aliases: set[int]) -> Callable[..., Any]:
    """The program to trace; `aliases` receives which of its outputs share memory with a mutated input."""

    def run(*inputs: Any) -> Any:
        mode = FunctionalTensorMode(pre_dispatch=True, export=True, _allow_token_discovery=True)
        with mode, fx.traceback.preserve_node_meta():
            wrapped = [FunctionalTensor.to_functional(x) if isinstance(x, torch.Tensor) else x for x in inputs]
            outputs = fx.Interpreter(module).run(*wrapped)
        storages = {_storage(f) for f in wrapped if isinstance(f, FunctionalTensor) and _was_mutated(f)}
        flat = pytree.tree_leaves(outputs)
        aliases.update(i for i, o in enumerate(flat) if isinstance(o, FunctionalTensor) and _storage(o) in storages)
        outputs = pytree.tree_map(_unwrap, outputs)
        for value, functional in zip(inputs, wrapped, strict=True):
            if isinstance(functional, FunctionalTensor) and _was_mutated(functional):
                value.copy_(_unwrap(functional))
        return outputs

    return run


def _was_mutated(tensor: FunctionalTensor) -> bool:
    return bool(torch._functionalize_has_data_mutation(tensor.elem))  # type: ignore[attr-defined]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _return_inputs_themselves(module: fx.GraphModule, aliases: set[int]) -> None:
    """Give outputs that are a mutated input, or views of one, as that: the caller keeps the tensor that he had.

    The views are made again from the `copy_` of the final value, which is the input.
    """
    output = module.graph.output_node()
    updated = {n.args[1]: n for n in module.graph.find_nodes(op="call_function", target=ATEN.copy_.default)}
    flat, spec = pytree.tree_flatten(output.args[0])
    with module.graph.inserting_before(output):
        for i in aliases:
            flat[i] = _made_from(flat[i], updated, module.graph) or flat[i]
    output.args = (pytree.tree_unflatten(flat, spec),)


def _made_from(node: fx.Node, updated: dict[Any, fx.Node], graph: fx.Graph) -> fx.Node | None:
    chain: list[fx.Node] = []
    while node not in updated:
        if not is_view(node) or node.target in COPIES or not isinstance(node.args[0], fx.Node):
            return None
        chain.append(node)
        node = node.args[0]
    made = updated[node]
    for view in reversed(chain):
        source, base = view.args[0], made
        made = graph.node_copy(view, lambda n, source=source, base=base: base if n is source else n)  # type: ignore[misc]
    return made


def _unwrap(value: Any) -> Any:
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)  # type: ignore[attr-defined, no-untyped-call]
    return torch._from_functional_tensor(value.elem)


def _refuse_shared_inputs(traced: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    written = {n.args[0] for n in traced.graph.find_nodes(op="call_function", target=ATEN.copy_.default)}
    refuse_shared_memory(
        (node.meta["source_name"], example, node in written)
        for node, example in zip(traced.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        if isinstance(example, torch.Tensor)
    )


def refuse_shared_memory(inputs: Iterable[tuple[str, torch.Tensor, bool]]) -> None:
    """Raise TraceError where a write to one input would be seen through another: the trace takes them for separate.

    Of each input its name, its tensor, and whether it is written.
    """
    known = list(inputs)
    for i, (name, tensor, is_written) in enumerate(known):
        for j, (other, same, _) in enumerate(known):
            if is_written and i != j and _overlap(tensor, same):
                raise TraceError(
                    f"{name} and {other} share memory and one is written",
                    hint="give the model separate tensors; this graph runs unfused",
                )


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    if isinstance(left, FakeTensor) or isinstance(right, FakeTensor) or left.device != right.device:
        return False
    if left.device.type == "meta" or left.numel() == 0 or right.numel() == 0:
        return False
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return False
    (a, b), (c, d) = _extent(left), _extent(right)
    return a < d and c < b


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes from the first element to behind the last, in the storage."""
    span = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first, first + span * tensor.element_size()


def _mark_inputs(traced: fx.GraphModule, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Keep Dynamo's names, and which inputs are weights: a report speaks of them, a cut must not end in them."""
    ours = traced.graph.find_nodes(op="placeholder")
    theirs = module.graph.find_nodes(op="placeholder")
    for new, old, example in zip(ours, theirs, example_inputs, strict=True):
        new.meta["is_parameter"] = isinstance(example, torch.nn.Parameter)
        new.meta["source_name"] = old.name
        new.meta["source"] = getattr(old, "_dynamo_source", None)
        new.meta["parameter_path"] = _path_in_model(old)


def _path_in_model(placeholder: fx.Node) -> str:
    """The path that a state dict has for a parameter which Dynamo gives; the node's name where that is unknown."""
    source = getattr(placeholder, "_dynamo_source", None)
    parts = re.findall(r"\._(?:modules|parameters)\['([^']+)'\]", source.name) if source is not None else []
    return ".".join(parts) or placeholder.name


@contextmanager
def _plain_grad_state() -> Iterator[None]:
    # The compiled region is for inference; autograd wrappers in a functional trace would only add detach nodes.
    with torch.no_grad() if not torch.is_inference_mode_enabled() else nullcontext():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
