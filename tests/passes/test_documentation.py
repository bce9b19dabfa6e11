"""What a pass's docstring says is executed: Before becomes After, and it says when it refuses."""

import re
import textwrap
from collections import Counter

import pytest
import torch
from captured import name_of, sketch
from programs import OPERANDS

from k31compile.graph.named_regions import label_of
from k31compile.options import Options
from k31compile.passes.pipeline import run_pipeline
from k31compile.passes.registry import all_passes

PASSES = {one.name: one for one in all_passes()}
names = pytest.mark.parametrize("name", PASSES)
BLOCKS = ("Before:", "After:", "Refuses when:")


def block(name, title):
    """The lines of a block without their indentation."""
    found = re.search(rf"^{title}\n((?:[ ]{{4}}.*\n?|\n)+)", PASSES[name].documentation, re.MULTILINE)
    assert found, f"{name} has no block {title}"
    return textwrap.dedent(found[1]).strip().splitlines()


def needed(name):
    """The fusions of a pass and of everything that it says it comes after."""
    one = PASSES[name]
    return {one.fusion}.union(*(needed(earlier) for earlier in (*one.needs, *one.after)))


def program_of(name):
    code = f"def program({', '.join(OPERANDS)}):\n" + textwrap.indent("\n".join(block(name, "Before:")), "    ")
    namespace = {"torch": torch}
    exec(code, namespace)
    return namespace["program"]


def final_graph(name):
    module = sketch(program_of(name), *OPERANDS.values()).module
    return run_pipeline(module, Options(fuse=tuple(needed(name))), "cpu")


def counted(module):
    return Counter(name_of(n) for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload))


def looks(module):
    """Every node with its label: some passes name regions and change nothing else."""
    return [(node.format_node(), label_of(node)) for node in module.graph.nodes]


@names
def test_the_blocks_are_there_in_their_order(name):
    assert [block(name, title) != [] for title in BLOCKS] == [True] * 3
    places = [PASSES[name].documentation.index(f"\n{title}") for title in BLOCKS]
    assert places == sorted(places)


@names
def test_before_becomes_after(name):
    found = counted(final_graph(name)[0])
    listed = Counter(operator.removeprefix("aten.") for operator in block(name, "After:"))
    assert {operator: found[operator] for operator in listed} == dict.fromkeys(listed, 1)
    assert {operator for operator in found if operator.startswith("k31.")} <= set(listed)


@names
def test_before_computes_what_after_computes(name):
    rewritten, _ = final_graph(name)
    rewritten.recompile()
    (got,) = rewritten(*OPERANDS.values())
    expected = program_of(name)(*OPERANDS.values())
    if not expected.is_floating_point():
        got, expected = got.sort(-1).values, expected.sort(-1).values
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@names
def test_without_the_pass_before_stays_different(name):
    module = sketch(program_of(name), *OPERANDS.values()).module
    others = tuple(needed(name) - {PASSES[name].fusion})
    kept, _ = run_pipeline(module, Options(fuse=others), "cpu")
    with_it, _ = final_graph(name)
    assert looks(kept) != looks(with_it)


@names
def test_refusals_are_sentences(name):
    text = " ".join(block(name, "Refuses when:"))
    assert text.endswith(".")
    assert all(len(part.split()) > 3 for part in text.split(";"))
