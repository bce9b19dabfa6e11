"""The width of a selection is fixed where the attention behind it leaves empty slots out, and nowhere else."""

import pytest
import torch
from captured import capture, one, sketch
from isomorphic import difference
from programs import INDEXED, OPERANDS, K, attended, attention, indexer, scored

from k31compile.options import Options
from k31compile.passes.layout import static_top_k as module_under_test
from k31compile.passes.layout.static_top_k import is_static_top_k, static_top_k
from k31compile.passes.pipeline import run_pipeline

LENGTHS = torch.tensor([7, 9])


def select(q, k, w, **how):
    how = {"sparse_mode": 0, "order": "score", "tail": "lowest", "sparse_count": K, **how}
    return indexer(q, k.unsqueeze(2), w, **how)


def attend(q, c, found, **how):
    return attention(q, c.unsqueeze(2), c.unsqueeze(2), found, 1.0, **{"sparse_mode": 0, **how})


def one_attention(q, k, w, c, i):
    return attend(q, c, select(q, k, w))


def two_attentions(q, k, w, c, i):
    found = select(q, k, w)
    return attend(q, c, found), attend(q * 2, c, found)


def same_lengths(q, k, w, c, i):
    lengths = i[:, :, 0] % 5
    found = select(q, k, w, actual_seq_lengths_key=lengths + 1)
    return attend(q, c, found, actual_seq_lengths_kv=lengths + 1)


def same_mode(q, k, w, c, i):
    return attend(q, c, select(q, k, w, sparse_mode=3), sparse_mode=3)


def returned(q, k, w, c, i):
    found = select(q, k, w)
    return attend(q, c, found), found


def counted(q, k, w, c, i):
    found = select(q, k, w)
    return attend(q, c, found), (found > 3).sum()


def as_a_query_too(q, k, w, c, i):
    found = select(q, k, w)
    return attend(q, c, found), found.float().softmax(-1)


def nobody_attends(q, k, w, c, i):
    return select(q, k, w) + 1


def other_mode(q, k, w, c, i):
    return attend(q, c, select(q, k, w, sparse_mode=3))


def mode_of_the_attention_alone(q, k, w, c, i):
    return attend(q, c, select(q, k, w), sparse_mode=3)


def other_lengths(q, k, w, c, i):
    lengths = i[:, :, 0] % 5
    return attend(q, c, select(q, k, w, actual_seq_lengths_key=lengths + 1), actual_seq_lengths_kv=lengths + 2)


def lengths_of_the_indexer_alone(q, k, w, c, i):
    return attend(q, c, select(q, k, w, actual_seq_lengths_key=i[:, :, 0] % 5 + 1))


def lengths_of_the_attention_alone(q, k, w, c, i):
    return attend(q, c, select(q, k, w), actual_seq_lengths_kv=i[:, :, 0] % 5 + 1)


def one_of_two_sees_others(q, k, w, c, i):
    found = select(q, k, w)
    return attend(q, c, found), attend(q, c, found, sparse_mode=3)


SERVED = [one_attention, two_attentions, same_lengths, same_mode]
REFUSED = [
    returned,
    counted,
    as_a_query_too,
    nobody_attends,
    other_mode,
    mode_of_the_attention_alone,
    other_lengths,
    lengths_of_the_indexer_alone,
    lengths_of_the_attention_alone,
    one_of_two_sees_others,
]


def traced(program):
    return sketch(program, *INDEXED.values()).module


def named(programs):
    return pytest.mark.parametrize("program", programs, ids=lambda p: p.__name__)


@named(SERVED)
def test_served(program):
    module = traced(program)
    assert static_top_k(module, Options()).changed == 1
    node = one(module, "k31.lightning_indexer")
    assert is_static_top_k(node)
    assert (node.kwargs["order"], node.kwargs["tail"], node.kwargs["sparse_count"]) == ("position", "minus_one", K)


@named(SERVED)
def test_what_is_served_computes_the_same(program):
    module = traced(program)
    static_top_k(module, Options())
    module.recompile()
    expected = program(*INDEXED.values())
    torch.testing.assert_close(
        module(*INDEXED.values()), expected if isinstance(expected, tuple) else (expected,), rtol=1e-5, atol=1e-5
    )


@named(REFUSED)
def test_refused(program):
    module = traced(program)
    assert static_top_k(module, Options()).changed == 0
    assert difference(module, traced(program)) == ""


@named(SERVED)
def test_a_second_run_changes_nothing(program):
    module = traced(program)
    static_top_k(module, Options())
    assert static_top_k(module, Options()).changed == 0


# Each condition with a near miss that nothing but this condition refuses.
CONDITIONS = [
    ("_only_attention_reads", returned),
    ("_only_attention_reads", nobody_attends),
    ("_sees_the_same", other_mode),
    ("_sees_the_same", other_lengths),
    ("_sees_the_same", one_of_two_sees_others),
    ("_same", other_lengths),
    ("_same", lengths_of_the_indexer_alone),
    ("_same", lengths_of_the_attention_alone),
]


@pytest.mark.parametrize(("condition", "program"), CONDITIONS, ids=lambda v: getattr(v, "__name__", v))
def test_without_a_condition_its_near_miss_is_rewritten(condition, program, monkeypatch):
    monkeypatch.setattr(module_under_test, condition, lambda *_: True)
    module = traced(program)
    assert static_top_k(module, Options()).changed > 0
    assert difference(module, traced(program)) != ""


def test_without_is_static_a_second_run_would_go_on_changing(monkeypatch):
    monkeypatch.setattr(module_under_test, "_is_static", lambda *_: False)
    module = traced(one_attention)
    assert [static_top_k(module, Options()).changed for _ in range(2)] == [1, 1]


def dynamic(q, k, w, c, i):
    return attended(q, c, scored(q, k, w).topk(min(16, k.shape[1]), dim=-1).indices)


def operands_of(length):
    generator = torch.Generator().manual_seed(length)
    q, w = OPERANDS["q"], OPERANDS["w"]
    k, c = (torch.randn(2, length, 24, generator=generator) for _ in range(2))
    for tensor in (k, c):
        torch._dynamo.mark_dynamic(tensor, 1)
    return q, k, w, c, OPERANDS["i"]


@pytest.mark.parametrize("length", [13, 40])
def test_a_symbolic_count_gets_the_width_of_its_constant(length):
    module, stages = run_pipeline(capture(dynamic, *operands_of(length)).module, Options(), "cpu")
    assert [stage.run.changed for stage in stages if stage.run.changed] == [1, 1, 1]
    node = one(module, "k31.lightning_indexer")
    assert node.kwargs["sparse_count"] == 16
    assert node.meta["val"].shape[-1] == 16
    assert (node.kwargs["order"], node.kwargs["tail"]) == ("position", "minus_one")


def test_one_graph_serves_every_length():
    graphs = []

    def backend(module, example_inputs):
        from k31compile.backend import k31

        graphs.append(module)
        return k31(module, example_inputs, options={"codegen": "ops"})

    compiled = torch.compile(dynamic, backend=backend)
    for length in (13, 40, 16, 35, 5):
        operands = operands_of(length)
        with torch.no_grad():
            got = compiled(*operands)
        torch.testing.assert_close(got, dynamic(*operands), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


def test_a_count_without_a_bound_stays_symbolic():
    def program(q, k, w, c, i):
        return attended(q, c, scored(q, k, w).topk(k.shape[1] - 1, dim=-1).indices)

    captured = capture(program, *operands_of(13))
    module, _ = run_pipeline(captured.module, Options(), "cpu")
    node = one(module, "k31.lightning_indexer")
    assert not is_static_top_k(node)
