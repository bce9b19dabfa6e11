"""A graph through npugraph_ex's own compiler, up to the code that it generates: what would be captured on a device."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from k31compile.targets.ascend.offline.convert import on_npu
from k31compile.targets.ascend.tagged_streams import main_label

NAMESPACE = "npugraph_ex."
RECORD, WAIT, KEEP = (f"{NAMESPACE}{name}.default" for name in (
    "tagged_event_record", "tagged_event_wait", "record_tagged_stream"
))  # fmt: skip

# Every pass of npugraph_ex that may move, merge, drop or write in place what a schedule has placed; each looks at the
# direct readers of a value alone, and not at those of its views on another stream, or at writes in between.
AS_SCHEDULED: Mapping[str, bool] = {
    "inplace_pass": False,
    "input_inplace_pass": False,
    "remove_cat_ops": False,
    "remove_noop_ops": False,
    "pattern_fusion_pass": False,
}

# The generated streams have their labels in a table of the module, and record_tagged_stream looks them up in another,
# where it would make new ones: a tensor would be kept for a stream that nothing runs on. The caller's own has no label.
_SAME_STREAMS = """
from npugraph_ex.scope._scope_attr import _GLOBAL_TAG_TO_STREAM, _GLOBAL_TAGGED_STREAM_LOCK

_make_streams, _run_kernel = _update_user_stream_label_dict, kernel


def _update_user_stream_label_dict():
    if not _GLOBAL_USER_TAG_TO_STREAM:
        _make_streams()
    with _GLOBAL_TAGGED_STREAM_LOCK:
        _GLOBAL_TAG_TO_STREAM.update(_GLOBAL_USER_TAG_TO_STREAM)
        _GLOBAL_TAG_TO_STREAM[{main!r}] = aclgraph_cache_info.stream


def kernel(*args, **kwargs):
    _update_user_stream_label_dict()
    return _run_kernel(*args, **kwargs)
"""


@dataclass(frozen=True)
class Call:
    """One line of the generated code that calls an operator.

    Attributes:
        name: of the node that it is of.
        operator: without `torch.ops`.
        stream: the label of the stream that is current there; empty for the caller's.
        arguments: what it is given, names as names and strings as themselves.
    """

    name: str
    operator: str
    stream: str
    arguments: tuple[str, ...]

    @property
    def is_marker(self) -> bool:
        """Whether it only says where others run."""
        return self.operator.startswith(NAMESPACE)


@dataclass(frozen=True)
class AclGraph:
    """What npugraph_ex made: the code that a device would run once and capture, and the graph that it is of."""

    name: str
    code: str
    module: fx.GraphModule

    def calls(self) -> list[Call]:
        """Every call of the captured function in the order of issue, as the code has it."""
        return read_calls(self.code)

    def operators(self) -> list[Call]:
        """The calls that compute, or give a view or a part of a result."""
        return [call for call in self.calls() if not call.is_marker]

    def events(self) -> dict[str, tuple[list[str], list[str]]]:
        """For each tag the streams that record it and those that wait for it, in the order of issue."""
        found: dict[str, tuple[list[str], list[str]]] = {}
        for call in self.calls():
            if call.operator in (RECORD, WAIT):
                found.setdefault(call.arguments[0], ([], []))[call.operator == WAIT].append(call.stream)
        return found

    def kept(self) -> list[tuple[str, str]]:
        """Each tensor that is recorded for another stream, with that stream's label."""
        return [(call.arguments[0], call.arguments[1]) for call in self.calls() if call.operator == KEEP]

    def synchronisation(self) -> dict[str, int]:
        """How many events and waits there are, npugraph_ex's own included, and how often a tensor is kept."""
        events = self.events().values()
        return {
            "events": len(events),
            "waits": sum(len(waits) for _, waits in events),
            "record_streams": len(self.kept()),
        }

    def counts(self) -> dict[str, int]:
        """How many calls there are of each operator of a namespace; markers are left out."""
        found: dict[str, int] = {}
        for call in self.operators():
            if "." in call.operator:
                found[call.operator] = found.get(call.operator, 0) + 1
        return found


def generate(
    module: fx.GraphModule, example_inputs: Sequence[Any], name: str, options: Mapping[str, Any] = AS_SCHEDULED
) -> AclGraph:
    """Take a graph through npugraph_ex's passes to its generated code; needs an open session.

    example_inputs are CPU, meta or fake tensors: npugraph_ex is shown tensors of an NPU of their shapes and strides.

    Raises:
        RuntimeError: npugraph_ex's own.
    """
    from npugraph_ex.npu_fx_compiler import compile_fx

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    inputs = on_npu(example_inputs, mode)
    # npugraph_ex calls each operator once while it looks at a graph; what takes no tensor would run on a device.
    with tracing(TracingContext(mode)), mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = compile_fx(module, inputs, dict(options))
        code = made.get_code()
    if "def _update_user_stream_label_dict" in code:
        code += _SAME_STREAMS.format(main=main_label(name))
    return AclGraph(name, code, made.runner.fx_graph)


def forget_events() -> None:
    """Drop the tags of graphs before: npugraph_ex writes all that a process has named into each graph's code."""
    from npugraph_ex._acl_concrete_graph.graph_pass import _GLOBAL_SCOPE_TAG_TO_EVENT

    _GLOBAL_SCOPE_TAG_TO_EVENT.clear()


def read_calls(code: str) -> list[Call]:
    """The calls of generated code's `forward`, each with the stream of the block that it stands in."""
    functions = [one for one in ast.parse(code).body if isinstance(one, ast.FunctionDef) and one.name == "forward"]
    return list(_calls(functions[0].body, ""))


def _calls(lines: Sequence[ast.stmt], stream: str) -> Iterator[Call]:
    for line in lines:
        if isinstance(line, ast.With):
            label = _stream_of(line)
            yield from _calls(line.body, stream if label is None else label)
        elif isinstance(line, ast.If):
            yield from _calls([*line.body, *line.orelse], stream)
        elif isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Call | ast.Subscript):
            target = line.targets[0] if isinstance(line, ast.Assign) else line.target
            yield Call(ast.unparse(target), *_called(line.value, stream))


def _stream_of(block: ast.With) -> str | None:
    """The label in `with torch.npu.stream(_GLOBAL_USER_TAG_TO_STREAM['label'])`."""
    context = block.items[0].context_expr
    if not isinstance(context, ast.Call) or ast.unparse(context.func) != "torch.npu.stream":
        return None
    (argument,) = context.args
    assert isinstance(argument, ast.Subscript)
    return str(ast.literal_eval(argument.slice))


def _called(value: ast.Call | ast.Subscript, stream: str) -> tuple[str, str, tuple[str, ...]]:
    if isinstance(value, ast.Subscript):
        return "getitem", stream, (ast.unparse(value.value),)
    arguments = [
        str(one.value) if isinstance(one, ast.Constant) else ast.unparse(one)
        for one in (*value.args, *(keyword.value for keyword in value.keywords))
    ]
    return ast.unparse(value.func).removeprefix("torch.ops."), stream, tuple(arguments)
