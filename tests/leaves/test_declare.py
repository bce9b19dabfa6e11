"""`k31compile.equivalent`: believed after calling, refused with numbers, used by the next compile."""

import functions
import pytest
import torch

import k31compile
from k31compile.errors import EquivalenceError, UsageError
from k31compile.leaves import candidates


def written_one_by_one(query, key, value, alpha, b, h0):
    """Decays as they are multiplied, number by number: no graph shows the rule in it."""
    state, out = h0.clone(), torch.zeros_like(value)
    for t in range(query.shape[1]):
        for i in range(query.shape[3]):
            state[:, :, i] = state[:, :, i] * alpha[:, t, :, i, None].exp()
        seen = torch.zeros_like(value[:, t])
        for i in range(query.shape[3]):
            seen = seen + key[:, t, :, i, None] * state[:, :, i]
        write = b[:, t, :, None] * (value[:, t] - seen)
        for i in range(query.shape[3]):
            state[:, :, i] = state[:, :, i] + key[:, t, :, i, None] * write
            out[:, t] = out[:, t] + query[:, t, :, i, None] * state[:, :, i]
    return out, state


@pytest.fixture(autouse=True)
def _nothing_declared():
    before = dict(candidates._DECLARED)
    yield
    candidates._DECLARED.clear()
    candidates._DECLARED.update(before)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (functions.kda_recurrent, "kda_recurrent"),
        (functions.kda_chunk, "kda_chunk"),
        (functions.gated_delta_recurrent, "gated_delta_recurrent"),
        (functions.whole_chunks, "kda_chunk"),
        (written_one_by_one, "kda_recurrent"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_what_is_true_is_taken(function, name):
    assert k31compile.equivalent(function, name) is None
    assert candidates._DECLARED[function] == name


@torch.no_grad()
def test_a_declared_function_is_a_leaf_of_the_next_compile():
    k31compile.equivalent(written_one_by_one, "kda_recurrent")
    tensors = functions.operands(5)
    options = {"codegen": "ops", "fuse": ["kda_recurrent"]}
    got = torch.compile(lambda *a: written_one_by_one(*a), backend="k31", options=options)(*tensors)
    report = k31compile.last_report()
    assert report.fused == {"kda_recurrent": 1}
    assert report.leaves[0]["why"] == "declared"
    for ours, theirs in zip(got, written_one_by_one(*tensors), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "name", "words"),
    [
        (
            functions.predicts_before_decay,
            "kda_recurrent",
            r"differs from .* by \d\.\de[-+]\d\d of its size in sample \d",
        ),
        (functions.forgets_after_48, "kda_recurrent", r"differs .* in sample \d+ \(B=\d, T=\d+, H=\d, K=7, V=11\)"),
        (functions.kda_recurrent, "gated_delta_recurrent", r"not gated_delta_recurrent"),
        (functions.writes_its_state, "kda_recurrent", "writes into its argument initial_state"),
        (functions.reads_a_table, "kda_recurrent", "reads the global TABLE"),
        (functions.draws, "kda_recurrent", "draws random numbers"),
        (len, "kda_chunk", "is a builtin_function_or_method"),
        (functions.unit, "kda_chunk", "tensors"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_what_is_not_is_refused(function, name, words):
    with pytest.raises(EquivalenceError, match=words) as caught:
        k31compile.equivalent(function, name)
    assert str(caught.value).startswith("K31-0208: ")
    assert function not in candidates._DECLARED if callable(getattr(function, "__get__", None)) else True


def test_a_name_that_cannot_be_declared_lists_those_that_can():
    with pytest.raises(
        UsageError, match="declarable: gated_delta_chunk, gated_delta_recurrent, kda_chunk, kda_recurrent"
    ):
        k31compile.equivalent(functions.kda_chunk, "softmax")
