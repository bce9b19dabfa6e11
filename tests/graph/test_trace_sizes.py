"""Symbolic sizes stay symbolic: the trace adds no guard, so nothing is compiled more often than by eager's backend."""

import pytest
import torch
from captured import capture
from torch._guards import TracingContext

from k31compile.graph.trace import trace_functional


def attend(q, k):
    scores = torch.einsum("btd,bsd->bts", q, k)
    hidden = torch.arange(k.shape[1]) > torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1])
    best = scores.masked_fill(hidden, float("-inf")).topk(min(11, k.shape[1]), dim=-1).indices
    return k.gather(1, best.reshape(q.shape[0], -1, 1).expand(-1, -1, k.shape[2])).sum(1)


def compilations(backend):
    """How many graphs a decode loop costs, and the results of its steps."""
    graphs = []

    def counting(module, example_inputs):
        graphs.append(module)
        return backend(module, example_inputs)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=counting)
    generator, results = torch.Generator().manual_seed(0), []
    for length in range(6, 18):
        k = torch.randn(2, length, 8, generator=generator)
        torch._dynamo.mark_dynamic(k, 1)
        results.append(compiled(k[:, -1:].clone(), k))
    return len(graphs), results


def test_a_decode_loop_compiles_as_often_as_with_the_eager_backend():
    eager, expected = compilations(lambda module, _: module.forward)
    ours, got = compilations(lambda module, inputs: trace_functional(module, inputs).forward)
    assert (ours, eager) == (1, 1)
    torch.testing.assert_close(got, expected)


def test_the_trace_adds_no_guard():
    counts = []

    def backend(module, example_inputs):
        env = TracingContext.get().fake_mode.shape_env
        counts.append(len(env.guards))
        trace_functional(module, example_inputs)
        counts.append(len(env.guards))
        return module.forward

    torch.compile(attend, backend=backend, dynamic=True)(torch.randn(2, 3, 8), torch.randn(2, 9, 8))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.view(-1, 4),
        lambda x: x.reshape(x.shape[0] * 2, 2),
        lambda x: torch.zeros(x.shape[0], x.shape[0] + 1),
        lambda x: torch.cat([x, x]),
    ],
    ids=["view", "product", "factory", "cat"],
)
def test_the_traced_graph_serves_other_lengths(program):
    captured = capture(program, torch.randn(6, 4), dynamic=True)
    for length in (7, 3):
        x = torch.randn(length, 4)
        other = [
            length if isinstance(i, int) and i == 6 else x if isinstance(i, torch.Tensor) else i
            for i in captured.inputs
        ]
        torch.testing.assert_close(captured.run(*other)[0], program(x))
