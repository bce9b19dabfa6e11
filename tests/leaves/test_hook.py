"""Leaves in compiles of ours, and in nobody else's."""

import functions
import pytest
import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

import k31compile
from k31compile.backend import k31
from k31compile.leaves import hook

OPS = {"codegen": "ops", "fuse": ["kda_chunk", "kda_recurrent"]}


class Steps(nn.Module):
    """A model whose rule is a function of a shipped name."""

    def forward(self, q, k, v, g, beta, state):
        out, state = functions.kda_recurrent(torch.tanh(q), k, v, g, beta, initial_state=state)
        return out * 2, state


class Chunks(nn.Module):
    """Keyword arguments, heads first, no state."""

    def forward(self, q, k, v, g, beta):
        return functions.kda_chunk(k, q, v, decay=g, lr=beta, normalise=True) + 1


def compiled(model, **options):
    return torch.compile(model, backend="k31", options={**OPS, **options}, dynamic=False)


def assert_close(got, want):
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=3e-5)


def registered():
    handlers = TorchInGraphFunctionVariable._get_handlers()
    every = [value for value in vars(functions).values() if callable(value)]
    return [f for f in every if f in handlers or trace_rules.is_callable_allowed(f)]


@torch.no_grad()
def test_a_function_of_a_shipped_name_is_a_leaf_from_the_first_call():
    tensors = functions.operands(12)
    got = compiled(Steps())(*tensors)
    report = k31compile.last_report()
    assert_close(got, Steps()(*tensors))
    assert report.fused == {"kda_recurrent": 1}
    (leaf,) = report.leaves
    assert (leaf["function"], leaf["operator"], leaf["why"], leaf["calls"]) == ("kda_recurrent",) * 2 + ("shipped", 1)
    assert "leaves/functions.py:" in leaf["where"]
    assert "confirmed on" in leaf["text"]
    assert "kda_recurrent: the function kda_recurrent (leaves/functions.py" in str(report)
    assert report.nodes_before < 20
    assert not report.refused


@torch.no_grad()
def test_the_graph_does_not_depend_on_the_length():
    nodes = []
    for length in (40, 300):
        *tensors, _ = functions.operands(length, heads_first=True)
        assert_close([compiled(Chunks())(*tensors)], [Chunks()(*tensors)])
        nodes.append((k31compile.last_report().nodes_before, k31compile.last_report().nodes_after))
        assert k31compile.last_report().fused == {"kda_chunk": 1}
    assert nodes[0] == nodes[1]


@torch.no_grad()
def test_a_length_that_changes_needs_two_graphs_and_no_more():
    torch._dynamo.reset()
    model = torch.compile(Steps(), backend="k31", options=OPS)
    for length in (12, 33, 50, 71):
        tensors = functions.operands(length)
        assert_close(model(*tensors), Steps()(*tensors))
    assert [report.fused for report in k31compile.reports()] == [{"kda_recurrent": 1}] * 2


@torch.no_grad()
def test_other_backends_are_untouched_before_in_between_and_after():
    tensors = functions.operands(6)
    want = Steps()(*tensors)

    def nodes_of_another():
        graphs = []

        def backend(module, _):
            graphs.append(module)
            return module.forward

        torch._dynamo.reset()
        assert_close(torch.compile(Steps(), backend=backend)(*tensors), want)
        assert not any(hasattr(node.target, "k31_leaf") for graph in graphs for node in graph.graph.nodes)
        return [len(graph.graph.nodes) for graph in graphs]

    before = nodes_of_another()
    assert before[0] > 60
    assert_close(compiled(Steps())(*tensors), want)
    assert k31compile.last_report().leaves
    assert nodes_of_another() == before
    assert registered() == []


@pytest.mark.slow
@torch.no_grad()
def test_a_plain_inductor_compile_afterwards_sees_its_globals_change(monkeypatch):
    def small(q, k, v, g, beta):
        return functions.kda_chunk(k, q, v, g, beta, chunk=2)

    *tensors, _ = functions.operands(4, heads_first=True)
    compiled(small)(*tensors)
    assert k31compile.last_report().leaves
    torch._dynamo.reset()
    plain = torch.compile(small, backend="inductor")
    assert_close([plain(*tensors)], [small(*tensors)])
    monkeypatch.setattr(functions, "HALF", 0.25)
    assert_close([plain(*tensors)], [small(*tensors)])


@torch.no_grad()
@pytest.mark.parametrize("name", ["HALF", "unit"])
def test_a_leaf_is_compiled_anew_when_what_it_reads_changes(monkeypatch, name):
    *tensors, _ = functions.operands(18, heads_first=True)
    model = compiled(Chunks())
    model(*tensors)
    monkeypatch.setattr(functions, name, 0.25 if name == "HALF" else lambda x: x / 2)
    assert_close([model(*tensors)], [Chunks()(*tensors)])
    assert len(k31compile.reports()) == 2


@torch.no_grad()
def test_another_compile_inside_ours_is_not_ours():
    tensors, seen = functions.operands(5), []

    def inner(module, _):
        seen.append(len(module.graph.nodes))
        return module.forward

    def outer(module, example_inputs):
        seen.append([hasattr(node.target, "k31_leaf") for node in module.graph.nodes].count(True))
        torch.compile(Steps(), backend=inner)(*functions.operands(4))
        assert hook.current() is not None
        return k31(module, example_inputs, options=OPS)

    outer.compiler_fn = k31  # as the wrapper of torch.compile says for whom it compiles
    torch.compile(Steps(), backend=outer)(*tensors)
    assert seen[0] == 1
    assert all(count > 40 for count in seen[1:])
    assert hook.current() is None


@torch.no_grad()
def test_everything_is_undone_when_a_compile_raises():
    with pytest.raises(Exception, match="did you mean"):
        compiled(Steps(), codegen="op")(*functions.operands(5))

    class Fails(nn.Module):
        def forward(self, q, k, v, g, beta, state):
            out, state = functions.kda_recurrent(q, k, v, g, beta, state)
            return out.view(17, -1), state

    with pytest.raises(Exception, match=r"shape|size"):
        compiled(Fails())(*functions.operands(5))
    assert registered() == []
    assert hook.current() is None


def test_gradients_are_those_of_the_function():
    tensors = [tensor.requires_grad_() for tensor in functions.operands(4)]
    got, _ = compiled(Steps())(*tensors)
    want, _ = Steps()(*tensors)
    assert_close(torch.autograd.grad(got.sum(), tensors), torch.autograd.grad(want.sum(), tensors))
    assert k31compile.last_report().leaves == []
    assert "want gradients" in k31compile.last_report().refused[0].reason


@torch.no_grad()
def test_what_is_left_out_is_no_leaf():
    tensors = functions.operands(4)
    assert_close(compiled(Steps(), fuse=[])(*tensors), Steps()(*tensors))
    assert k31compile.last_report().fused == {}
    assert "left out" in k31compile.last_report().refused[0].reason


@torch.no_grad()
def test_under_autocast_and_inference_mode_results_are_those_of_eager():
    tensors = functions.operands(4)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(compiled(Steps())(*tensors), Steps()(*tensors))
    with torch.inference_mode():
        torch._dynamo.reset()
        assert_close(compiled(Steps())(*tensors), Steps()(*tensors))
        assert k31compile.last_report().leaves


@torch.no_grad()
def test_a_name_alone_is_not_believed(monkeypatch):
    """A function of a shipped name that computes something else is traced like any other, with its reason."""

    def kda_recurrent(q, k, v, g, beta, initial_state):
        return functions.predicts_before_decay(q, k, v, g, beta, initial_state)

    monkeypatch.setattr(functions, "kda_recurrent", functions.predicts_before_decay)
    functions.predicts_before_decay.__code__ = functions.predicts_before_decay.__code__.replace(co_name="kda_recurrent")
    tensors = functions.operands(5)
    assert_close(compiled(Steps())(*tensors), Steps()(*tensors))
    report = k31compile.last_report()
    assert report.leaves == []
    assert "kda_recurrent" not in report.fused
    assert any("differs from the gated delta rule" in str(refusal) for refusal in report.refused)
