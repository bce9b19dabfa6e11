"""Functions called: what they are, confirmed; what is close, refused with numbers; what is unfit, with why."""

import functions
import pytest
import torch

from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import Call
from k31compile.leaves.confirm import Denied, confirm_call
from k31compile.leaves.form import Form
from k31compile.leaves.reading import CalledReading
from k31compile.leaves.source import examine


def confirmed(function, *args, **kwargs):
    call = Call.of(function, args, kwargs)
    return call, confirm_call(call, examine(function))


def order(tensor):
    return sorted((d for d in range(tensor.dim()) if tensor.shape[d] > 1), key=tensor.stride)


def assert_served(call, form, tensors):
    """The program gives what the function gives, in its types; dimensions lie in memory in the same order."""
    values = dict(zip(call.tensors, tensors, strict=True))
    got, want = CalledReading(form).program(values), call.run(values)
    got, want = ([x] if isinstance(x, torch.Tensor) else x for x in (got, want))
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
            assert order(ours) == order(theirs)


def test_a_step_function_of_any_length():
    call, form = confirmed(functions.kda_recurrent, *functions.operands(40))
    assert (form.operator, form.shortest, form.step) == ("kda_recurrent", 1, 1)
    assert form.operands["gate"].name == "g"
    assert form.evidence.samples >= 16
    assert form.evidence.worst_error < 1e-9
    for length in (1, 2, 33):
        assert_served(call, form, functions.operands(length))


def test_chunks_with_heads_first_and_other_names_in_another_order():
    q, k, v, g, beta, _ = functions.operands(40, heads_first=True)
    call, form = confirmed(functions.kda_chunk, k, q, v, g, beta)
    assert form.operator == "kda_chunk"
    assert form.scale == functions.HALF
    assert {role: one.name for role, one in form.operands.items()} == {
        "query": "queries", "key": "keys", "value": "values", "gate": "decay", "beta": "lr",
    }  # fmt: skip
    assert {16, 17, 35} <= set(form.evidence.lengths)
    q, k, v, g, beta, _ = functions.operands(71, batch=1, heads_first=True)
    assert_served(call, form, (k, q, v, g, beta))


def test_norms_inside_are_found_with_their_eps():
    q, k, v, g, beta, _ = functions.operands(40, heads_first=True)
    call, form = confirmed(functions.kda_chunk, k, q, v, g, beta, normalise=True)
    assert [form.operands[role].eps for role in ("query", "key", "value")] == [1e-6, 1e-6, None]
    assert_served(call, form, (4 * k, 0.01 * q, v, g, beta))


def test_one_gate_a_head_is_another_operator():
    q, k, v, g, beta, state = functions.operands(12, scalar=True)
    for wanted, state_given in ((True, state), (False, None)):
        call, form = confirmed(
            functions.gated_delta_recurrent, q, k, v, beta, g, initial_state=state_given, output_final_state=wanted
        )
        assert form.operator == "gated_delta_recurrent"
        assert (form.final is not None) == wanted
        assert form.scale == pytest.approx(10**-0.5)
        assert_served(call, form, [x for x in (q, k, v, beta, g, state_given) if x is not None])


def test_whole_chunks_serve_whole_chunks_only():
    *tensors, _ = functions.operands(64)
    call, form = confirmed(functions.whole_chunks, *tensors)
    assert form.step == 16
    assert form.fits(call)
    *others, _ = functions.operands(40)
    assert not form.fits(Call.of(functions.whole_chunks, others, {}))


def test_a_form_fits_calls_with_sizes_that_agree_and_no_others():
    _, form = confirmed(functions.kda_recurrent, *functions.operands(6))
    assert form.fits(Call.of(functions.kda_recurrent, functions.operands(900, batch=5, heads=1), {}))
    assert not form.fits(Call.of(functions.kda_recurrent, functions.operands(6, k=11), {}))
    mixed = [*functions.operands(6)[:5], functions.operands(6, batch=1)[5]]
    assert not form.fits(Call.of(functions.kda_recurrent, mixed, {}))
    assert Form.from_dict(form.to_dict()) == form


def test_equal_sizes_are_told_apart_by_calling():
    tensors = functions.operands(4, batch=4, heads=4, k=4, v=4)
    call, form = confirmed(functions.kda_recurrent, *tensors)
    assert form.operands["state"].dims == (0, 1, 2, 3)
    assert_served(call, form, functions.operands(3, batch=2, heads=5, k=4, v=4))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (functions.predicts_before_decay, torch.float32),
        (functions.forgets_after_48, torch.float32),
        (functions.special_for_one_sequence, torch.float32),
        (functions.clamps_keys, torch.float32),
        (functions.other_in_half_precision, torch.bfloat16),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_what_is_close_is_denied_with_numbers(function, dtype):
    with pytest.raises(Denied, match=r"differs from .* by \d"):
        confirmed(function, *functions.operands(9, dtype=dtype))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (functions.writes_its_state, "writes into its argument initial_state"),
        (functions.reads_a_table, r"reads the global TABLE, a dict that may change"),
        (functions.reads_through_a_helper, r"reads_a_table \(leaves/functions.py:\d+\) reads the global TABLE"),
        (functions.draws, "draws random numbers with randn_like"),
        (functions.draws_by_dropout, "draws random numbers"),
        (functions.draws_by_python, "random"),
        (functions.counts, "sets the attribute calls"),
        (functions.appends, "reads the global CALLS, a list that may change"),
        (functions.asks_who_calls, "asks how it is called, with is_compiling"),
        (functions.changeable_default, "the default of factors .* is a list"),
        (functions.enclosing(2.0), "reads factor, a variable of the function around it"),
        (functions.long_lengths_differ, "holds the number 5000"),
        (functions.long_lengths_differ_by_a_float, "holds the number 5000"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_unfit_is_refused_with_the_reason(function, words):
    with pytest.raises(Unfit, match=words):
        confirmed(function, *functions.operands(9))


def test_a_builtin_and_a_wrong_number_of_tensors():
    with pytest.raises(Unfit, match="not a Python function"):
        examine(len)
    with pytest.raises(Unfit, match="takes 1 tensors"):
        confirmed(functions.unit, torch.ones(2, 3))
