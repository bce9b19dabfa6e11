"""The register: wrong declarations raise with names, and the order depends on what is declared alone."""

import ast
import itertools
import statistics
from pathlib import Path

import pytest

import k31compile.passes
from k31compile.errors import PassError
from k31compile.options import FUSIONS
from k31compile.passes import registry
from k31compile.passes.registry import Pass, PassResult, all_passes, ordered, register_pass

FOLDER = Path(k31compile.passes.__file__).parent
# The scheduler knows tasks, not graphs of operators; weights in blocks are decided in a lowered graph.
NO_PASSES = {
    "fusion": set(),
    "layout": {"fractal_nz", "nz_weights", "weight_readers"},
    "schedule": {
        "bounds",
        "calm",
        "cost_model",
        "graph_tasks",
        "improve",
        "list_placing",
        "merged_times",
        "placing",
        "play_schedule",
        "priorities",
        "replay",
        "schedule",
        "schedule_tasks",
        "stream_clocks",
        "super_kernels",
        "tasks",
        "verify_schedule",
        "verify_super_kernels",
        "windows",
        "work",
    },
}
FILES = sorted(
    path
    for folder, others in NO_PASSES.items()
    for path in (FOLDER / folder).glob("*.py")
    if path.stem not in {"__init__", *others}
)


def made(name, needs=(), after=()):
    return Pass(name, "static_top_k", needs, after, ("all",), "exact", lambda module, options: PassResult())


def names(passes):
    return [one.name for one in passes]


def test_a_duplicate_names_both_modules(monkeypatch):
    monkeypatch.setattr(registry, "_PASSES", {})
    declare = register_pass(name="twice", fusion="static_top_k", numerics="exact")
    declare(lambda module, options: PassResult())
    with pytest.raises(PassError, match="twice is registered twice") as caught:
        declare(all_passes)
    assert __name__ in caught.value.where
    assert all_passes.__module__ in caught.value.where


@pytest.mark.parametrize("how", ["needs", "after"])
def test_an_unknown_name_is_told_with_the_known_ones(how):
    with pytest.raises(PassError, match="pass b stands after 'missing'") as caught:
        ordered([made("a"), made("b", **{how: ("missing",)})])
    assert "known: a, b" in str(caught.value)


@pytest.mark.parametrize(
    "passes",
    [
        [made("a", after=("b",)), made("b", after=("a",))],
        [made("a", needs=("c",)), made("b", after=("a",)), made("c", needs=("b",)), made("d")],
        [made("a", after=("a",))],
    ],
    ids=["two", "three", "one"],
)
def test_a_cycle_is_told_with_its_passes(passes):
    with pytest.raises(PassError, match="cycle") as caught:
        ordered(passes)
    for name in names(passes):
        assert (name in caught.value.what.partition(":")[2]) == (name != "d")


def test_the_order_is_that_of_the_declarations_then_of_names():
    passes = [made("b"), made("a", after=("z",)), made("z"), made("c", needs=("a",)), made("d")]
    assert names(ordered(passes)) == ["b", "d", "z", "a", "c"]


def test_the_order_does_not_depend_on_that_of_registration():
    passes = [made("d", after=("b",)), made("c"), made("b"), made("a", needs=("c",))]
    assert {tuple(names(ordered(p))) for p in itertools.permutations(passes)} == {tuple(names(ordered(passes)))}


def test_every_pass_stands_after_what_it_names():
    place = {one.name: i for i, one in enumerate(all_passes())}
    for one in all_passes():
        assert all(place[earlier] < place[one.name] for earlier in (*one.needs, *one.after))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_registers_one_pass_of_its_own_name(path):
    module = f"k31compile.passes.{path.parent.name}.{path.stem}"
    assert names(one for one in all_passes() if one.run.__module__ == module) == [path.stem]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_what_it_does(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_every_pass_comes_from_a_file_of_its_folder():
    assert {one.name for one in all_passes()} == {path.stem for path in FILES}


def test_every_pass_serves_a_fusion_that_can_be_asked_for():
    assert {one.fusion for one in all_passes()} == set(FUSIONS)


def test_half_of_the_files_are_short():
    assert statistics.median(len(path.read_text().splitlines()) for path in FILES) <= 120


def test_identities_are_hashes_of_sources_and_differ():
    identities = [one.identity for one in all_passes()]
    assert len(set(identities)) == len(identities)
    assert all(len(identity) == 64 for identity in identities)
