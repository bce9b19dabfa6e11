"""Two bounds: what an unrolled loop may make of nodes, and what a confirmation may take of memory."""

import logging

import pytest
import torch
from running import relative_error
from test_bug_rows import squared_inverse

import k31compile

H, K, V = 2, 4, 6


def step(state, q, k, v, g, beta):
    state = state * g.exp().unsqueeze(-1)
    delta = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta.unsqueeze(-1)
    state = state + torch.einsum("bhk,bhv->bhkv", k, delta)
    return state, torch.einsum("bhkv,bhk->bhv", state, q)


def token_by_token(q, k, v, g, beta):
    state, rows = q.new_zeros(q.shape[0], H, K, V), []
    for t in range(q.shape[1]):  # the loop that is named
        state, row = step(state, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        rows.append(row)
    return torch.stack(rows, 1)


def model(q, k, v, g, beta):
    q = torch.nn.functional.normalize(q, dim=-1)
    return token_by_token(q, k, v, -g.abs(), beta.sigmoid()).relu() + 1


def operands(length):
    generator = torch.Generator().manual_seed(0)
    sizes = ((K,), (K,), (V,), (K,), ())
    q, k, v, g, beta = (torch.randn(1, length, H, *size, generator=generator) for size in sizes)
    return q, torch.nn.functional.normalize(k, dim=-1), v, g, beta


def compiled(fn, **options):
    return torch.compile(fn, backend="k31", options={"codegen": "ops", **options}, dynamic=False)


def test_a_loop_past_its_budget_runs_as_python_and_the_rest_is_compiled(caplog):
    arguments = operands(150)
    with caplog.at_level(logging.WARNING, logger="k31compile"), torch.no_grad():
        got = compiled(model, node_budget=800)(*arguments)
    assert relative_error(got, model(*arguments)) < 1e-5
    line = token_by_token.__code__.co_firstlineno + 2
    said = f"test_budgets.py:{line} in token_by_token makes more than 800 graph nodes"
    assert caplog.text.count(said) == 1
    reports = k31compile.reports()
    assert sum(said in note for report in reports for note in report.notes) == 1
    assert "option node_budget" in caplog.text
    # before the loop, one step that all tokens share (the first state lies otherwise in memory), behind the loop
    first, *steps, last = [report.fused.get("kda_recurrent", 0) for report in reports]
    assert (first, last) == (0, 0)
    assert steps in ([1], [1, 1])


def test_within_the_budget_it_is_one_graph():
    arguments = operands(20)
    with torch.no_grad():
        got = compiled(model, node_budget=800)(*arguments)
    assert relative_error(got, model(*arguments)) < 1e-5
    (report,) = k31compile.reports()
    assert report.fused == {"kda_recurrent": 1}


class Layer(torch.nn.Module):
    def forward(self, x):
        for _ in range(12):
            x = (x * 1.01).sin()
        return x


def test_many_layers_are_no_loop_over_tokens():
    layers = torch.nn.Sequential(*(Layer() for _ in range(60)))
    x = torch.randn(3)
    with torch.no_grad():
        torch.testing.assert_close(compiled(layers, node_budget=500)(x), layers(x))
    (report,) = k31compile.reports()
    assert report.nodes_before > 1000
    assert not report.notes


def test_a_confirmation_keeps_to_its_bytes_and_the_refusal_names_the_option():
    q, k, v, g, beta = operands(64)
    arguments = (q, k, v, -g.abs(), beta.sigmoid(), torch.zeros(1, H, K, V))
    with torch.no_grad():
        want, _ = squared_inverse(*arguments)
        got, _ = compiled(squared_inverse, confirm_bytes=20_000)(*arguments)
    assert relative_error(got, want) < 1e-5
    report = k31compile.last_report()
    assert not report.fused
    (said,) = [refusal.reason for refusal in report.refused if "would take" in refusal.reason]
    assert "more than the 1.86e-05 GiB that option confirm_bytes allows" in said
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(squared_inverse)(*arguments)
    assert k31compile.last_report().fused == {"kda_chunk": 1}


@pytest.mark.parametrize("name", ["node_budget", "confirm_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_a_budget_is_a_number_from_one_on(name, value):
    with pytest.raises(Exception, match=f"option '{name}' does not take"), torch.no_grad():
        compiled(torch.sin, **{name: value})(torch.ones(2))
