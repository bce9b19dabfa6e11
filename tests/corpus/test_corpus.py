"""Every spelling is its operator and no near miss is: held against definitions written once in float64."""

import ast
import inspect
import textwrap
from collections import Counter
from dataclasses import replace

import pytest
import torch
from catalogue import NEAR_MISSES, SPELLINGS
from definitions import DEFINITIONS
from judging import difference, expect, run
from operands import (
    ANSWER,
    ATTENDING,
    BEST_KEYS,
    BLOCKS,
    CACHED,
    CHANNELS,
    CHOSEN,
    EXPERTS,
    GROUPS,
    HIDDEN,
    INDEX_HEADS,
    INDEX_WIDTH,
    INNER,
    KEPT,
    KEYS,
    LATENT,
    PAGE,
    PICKED,
    ROUTED,
    SLOTS,
    TAPS,
    TURNED,
    B,
    H,
    K,
    V,
    make,
    operands,
)
from records import speller
from torch._dynamo.exc import Unsupported, UserError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten
from wide import Wide

SEEDS = (0, 1, 2)
SAME, OTHER = 1e-10, 1e-3
SINGLE, HALF = 2e-5, 2e-2


# Written-out programs of these are in tests/recognition, for they are judged by what they choose.
DRAWN_ONLY = {"lightning_indexer", "sparse_flash_attention"}


def at_lengths(table):
    return [
        pytest.param(program, length, id=f"{program.operator}-{name}-{length}")
        for name, program in table.items()
        for length in program.lengths
    ]


def difference_in(dtype, program, length, seed=0):
    return difference(run(program, length, seed, dtype), expect(program, length, seed, dtype))


@pytest.mark.parametrize(("program", "length"), at_lengths(SPELLINGS))
def test_a_spelling_is_its_operator(program, length):
    assert max(difference_in(torch.float64, program, length, seed) for seed in SEEDS) < SAME


@pytest.mark.parametrize(("program", "length"), at_lengths(SPELLINGS))
def test_a_spelling_runs_as_its_author_ran_it(program, length):
    """In float32, without anything widened."""
    assert difference_in(torch.float32, program, length) < SINGLE


@pytest.mark.parametrize(
    ("program", "length"), at_lengths({name: entry for name, entry in SPELLINGS.items() if entry.half})
)
def test_a_spelling_for_bfloat16_takes_bfloat16(program, length):
    assert difference_in(torch.bfloat16, program, length) < HALF


@pytest.mark.parametrize(("program", "length"), at_lengths(NEAR_MISSES))
def test_a_near_miss_is_not_its_operator(program, length):
    """It gives finite results of the operator's shapes, all other ones on every seed but those that are said."""
    for seed in SEEDS:
        got, want = run(program, length, seed), expect(program, length, seed)
        assert {name: x.shape for name, x in got.items()} == {name: x.shape for name, x in want.items()}
        assert all(x.isfinite().all() for x in got.values())
        assert difference(got, want) > OTHER
        assert all(difference({name: got[name]}, {name: want[name]}) < SAME for name in program.right)


@pytest.mark.parametrize("name", [*SPELLINGS, *NEAR_MISSES])
def test_nothing_is_written_but_what_is_said(name):
    """Casts that change nothing must not turn an author's work in place into writing to what was passed in."""
    program = (SPELLINGS | NEAR_MISSES)[name]
    length = program.lengths[0]
    given, fresh = operands(program, length), operands(program, length)
    with Wide():
        program.fn(*given)
    for argument, after, before in zip(program.arguments, given, fresh, strict=True):
        same = all(torch.equal(x, y) for x, y in zip(tensors_in(after), tensors_in(before), strict=True))
        assert same == (argument not in program.updates), argument


def tensors_in(x):
    return [y for y in tree_flatten(x)[0] if isinstance(y, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SPELLINGS)
def test_one_graph_or_said_to_break(name):
    """What Dynamo cannot take whole is marked; the rest gives the same as one captured graph."""
    program = SPELLINGS[name]
    torch._dynamo.reset()
    captured = torch.compile(program.fn, backend="eager", fullgraph=True)
    length = program.lengths[0]
    if program.breaks:
        with pytest.raises((Unsupported, UserError, GuardOnDataDependentSymNode)):
            captured(*operands(program, length, torch.float32))
        return
    dtype, bound = (torch.bfloat16, HALF) if program.half else (torch.float32, SINGLE)
    assert difference_in(dtype, replace(program, fn=captured), length) < bound


LISTED = [entry for entry in SPELLINGS.values() if "experts" in entry.results and entry.ordered]


@pytest.mark.parametrize("program", LISTED, ids=lambda program: program.name)
def test_the_best_expert_comes_first(program):
    assert torch.equal(run(program, 7, 0)["experts"].long(), expect(program, 7, 0)["experts"])


def test_there_are_enough_of_each():
    wanted = {
        "kda_recurrent": 14,
        "kda_chunk": 14,
        "short_conv": 6,
        "gated_rms_norm": 6,
        "attn_res": 6,
        "moe_gating_top_k": 6,
        "grouped_experts": 8,
        "mega_kda": 5,
    }
    assert wanted.keys() == DEFINITIONS.keys() - DRAWN_ONLY
    spelled = Counter(program.operator for program in SPELLINGS.values())
    missed = Counter(program.operator for program in NEAR_MISSES.values())
    assert all(spelled[operator] >= count for operator, count in wanted.items()), spelled
    assert all(missed[operator] >= 10 for operator in wanted), missed
    assert sum(spelled.values()) >= 60
    assert sum(missed.values()) >= 60


def test_each_says_in_one_line_what_is_peculiar():
    said = Counter()
    for program in (*SPELLINGS.values(), *NEAR_MISSES.values()):
        assert program.peculiar.endswith("."), program.name
        assert "\n" not in program.peculiar, program.name
        said[program.peculiar] += 1
    assert max(said.values()) == 1


class Renamed(ast.NodeTransformer):
    """The same code with names by order of appearance: what a change of names alone cannot change."""

    def __init__(self):
        self.names = {}

    def _name(self, name):
        return self.names.setdefault(name, f"n{len(self.names)}")

    def visit_FunctionDef(self, node):
        node.name, node.decorator_list = self._name(node.name), []
        node.body = node.body[1:] if ast.get_docstring(node) else node.body
        return self.generic_visit(node)

    def visit_arg(self, node):
        node.arg = self._name(node.arg)
        return node

    def visit_Name(self, node):
        node.id = self._name(node.id)
        return node


def shape_of_code(fn):
    return ast.dump(Renamed().visit(ast.parse(textwrap.dedent(inspect.getsource(fn)))))


def test_no_two_programs_are_the_same_code():
    seen = {}
    for program in (*SPELLINGS.values(), *NEAR_MISSES.values()):
        code = shape_of_code(program.fn)
        assert code not in seen, f"{program.name} is {seen.get(code)} under other names"
        seen[code] = program.name


def test_renaming_alone_is_noticed():
    def one(x, y):
        z = x + y
        return z * x

    def two(a, b):
        c = a + b
        return c * a

    def three(a, b):
        c = a + b
        return c * b

    assert shape_of_code(one) == shape_of_code(two) != shape_of_code(three)


KDA = (B, H, K, V)
CONV = (B, CHANNELS, TAPS, TAPS - 1)
SIZES = {
    "kda_recurrent": KDA,
    "kda_chunk": KDA,
    "short_conv": CONV,
    "gated_rms_norm": (B, H, V),
    "attn_res": (B, BLOCKS, SLOTS, HIDDEN),
    "moe_gating_top_k": (B, HIDDEN, EXPERTS, GROUPS, EXPERTS // GROUPS, KEPT, CHOSEN),
    "grouped_experts": (LATENT, INNER, 2 * INNER, ROUTED, PICKED),
    "mega_kda": (*KDA, *CONV[1:-1]),
    "lightning_indexer": (B, KEYS, INDEX_HEADS, INDEX_WIDTH, BEST_KEYS, PAGE),
    "sparse_flash_attention": (B, KEYS, BEST_KEYS, ATTENDING, CACHED, TURNED, CACHED + TURNED, ANSWER),
}


@pytest.mark.parametrize("operator", DEFINITIONS)
def test_batch_two_and_no_two_sizes_alike(operator):
    """An operand with two axes exchanged fits nowhere."""
    sizes = SIZES[operator]
    assert len(set(sizes)) == len(sizes)
    for program in (*SPELLINGS.values(), *NEAR_MISSES.values()):
        if program.operator == operator:
            assert not {length for length in program.lengths if length > 1} & set(sizes), program.name
    tensors = [x for x in make(operator, 13, 0).values() if isinstance(x, torch.Tensor)]
    assert all(len(set(x.shape)) == x.dim() or 1 in x.shape for x in tensors)


def test_operands_follow_seed_and_dtype():
    program = SPELLINGS["transposed_to_heads"]
    first, again, other = (operands(program, 5, torch.bfloat16, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert [x.dtype for x in first] == [torch.bfloat16] * 3 + [torch.float32] * 3


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="transposed_to_heads"):
        speller("kda_recurrent", arguments="q", results="o", phase="decode", lengths=(1,))()(
            SPELLINGS["transposed_to_heads"].fn
        )
