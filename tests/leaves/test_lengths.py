"""Tracing and confirmation cost the same for every length."""

import time

import functions
import pytest
import torch

import k31compile

OPS = {"codegen": "ops", "fuse": ["kda_chunk", "kda_recurrent", "gated_delta_chunk", "gated_delta_recurrent"]}


def chunked(q, k, v, g, beta):
    return functions.kda_chunk(k, q.tanh(), v, g, beta)


def stepped(q, k, v, g, beta):
    return functions.kda_recurrent(q.tanh(), k, v, g, beta)[0]


@torch.no_grad()
def cpu_seconds(model, length):
    """To compile, and the nodes of the graph; on the meta device, where a call costs nothing."""
    torch._dynamo.reset()
    *tensors, _ = functions.operands(length, heads_first=model is chunked)
    tensors = [tensor.to("meta") for tensor in tensors]
    compiled = torch.compile(model, backend="k31", options=OPS, dynamic=False)
    start = time.process_time()
    compiled(*tensors)
    return time.process_time() - start, k31compile.last_report()


@pytest.mark.parametrize("model", [chunked, stepped])
def test_a_long_prompt_compiles_as_fast_as_a_short_one(model):
    cpu_seconds(model, 64)  # confirms, and imports what is imported once
    short, long = ([cpu_seconds(model, length) for _ in range(3)] for length in (256, 4096))
    for _, report in (*short, *long):
        assert sum(report.fused.values()) == 1
        assert report.leaves
    assert len({(report.nodes_before, report.nodes_after) for _, report in (*short, *long)}) == 1
    assert min(seconds for seconds, _ in long) <= 1.5 * min(seconds for seconds, _ in short)


def test_confirming_for_a_long_call_costs_what_it_costs_for_a_short_one():
    from k31compile.leaves.call import Call
    from k31compile.leaves.confirm import confirm_call
    from k31compile.leaves.source import examine

    seen = []
    for length in (64, 256, 4096):
        *tensors, _ = functions.operands(length, heads_first=True)
        q, k, v, g, beta = (tensor.to("meta") for tensor in tensors)
        form = confirm_call(Call.of(functions.kda_chunk, (k, q, v, g, beta), {}), examine(functions.kda_chunk))
        seen.append(form.evidence)
    assert seen[0] == seen[1] == seen[2]
