"""From Dynamo's graph to pure data flow: pre-dispatch ATen, functionalised, with mutations as final copies.

One spelling per operator, composite operators (einsum, linear, matmul, softmax, topk) still whole. Without
functionalisation a reader does not depend on the in-place write that it sees, and no cut of the graph is sound.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
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
    try:
        with fake_mode, enable_python_dispatcher(), _quiet(), _plain_grad_state():
            traced = make_fx(_functional(module), pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(
                *inputs
            )
    except Exception as error:
        raise TraceError(
            f"the graph could not be traced functionally: {type(error).__name__}: {str(error).splitlines()[0]}",
            hint="the graph goes to Inductor as it is; please report it with the model's code",
        ) from error
    _mark_inputs(traced, module, example_inputs)
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


def _functional(module: fx.GraphModule) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        mode = FunctionalTensorMode(pre_dispatch=True, export=True, _allow_token_discovery=True)
        with mode, fx.traceback.preserve_node_meta():
            wrapped = [FunctionalTensor.to_functional(x) if isinstance(x, torch.Tensor) else x for x in inputs]
            outputs = fx.Interpreter(module).run(*wrapped)
        storages = {_storage(f): (v, f) for v, f in zip(inputs, wrapped, strict=True) if isinstance(f, FunctionalTensor)}
        values = pytree.tree_map(_unwrap, outputs)
        for value, functional in zip(inputs, wrapped, strict=True):
            if isinstance(functional, FunctionalTensor) and _was_mutated(functional):
                value.copy_(_unwrap(functional))
        return pytree.tree_map(lambda out, value: _as_alias(out, value, storages), outputs, values)

    return run


def _was_mutated(tensor: FunctionalTensor) -> bool:
    return bool(torch._functionalize_has_data_mutation(tensor.elem))  # type: ignore[attr-defined]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _as_alias(output: Any, value: Any, storages: dict[StorageWeakRef, tuple[torch.Tensor, FunctionalTensor]]) -> Any:
    """An output that is an input, or a view of one, is given as that: the caller keeps what he had."""
    if not isinstance(output, FunctionalTensor) or _storage(output) not in storages:
        return value
    given, functional = storages[_storage(output)]
    if output is functional:
        return given
    return given.as_strided(output.size(), output.stride(), output.storage_offset())


def _unwrap(value: Any) -> Any:
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)  # type: ignore[attr-defined, no-untyped-call]
    return torch._from_functional_tensor(value.elem)


def _mark_inputs(traced: fx.GraphModule, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Keep Dynamo's names, and which inputs are weights: a report speaks of them, a cut must not end in them."""
    ours = traced.graph.find_nodes(op="placeholder")
    theirs = module.graph.find_nodes(op="placeholder")
    for new, old, example in zip(ours, theirs, example_inputs, strict=True):
        new.meta["is_parameter"] = isinstance(example, torch.nn.Parameter)
        new.meta["source_name"] = old.name


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
