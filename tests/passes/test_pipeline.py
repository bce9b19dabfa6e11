"""A pass that fails is undone and told, the others go on; under strict it is an error."""

import pytest
import torch
from captured import operators, sketch
from isomorphic import difference
from programs import OPERANDS, both_before, scored

import k31compile
from k31compile.errors import StrictError
from k31compile.options import FUSIONS, Options
from k31compile.passes import pipeline
from k31compile.passes.pipeline import add_to_report, run_pipeline
from k31compile.passes.registry import Pass, PassResult, all_passes
from k31compile.report import Refusal, Report

ATEN = torch.ops.aten


def sin_becomes_cos(module, options):
    nodes = module.graph.find_nodes(op="call_function", target=ATEN.sin.default)
    for node in nodes:
        node.target = ATEN.cos.default
    return PassResult(len(nodes))


def raises_half_way(module, options):
    sin_becomes_cos(module, options)
    raise RuntimeError("half way")


def changes_the_output(module, options):
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        output.args = ((module.graph.call_function(ATEN.sum.default, (output.args[0][0],)),),)
    return PassResult(1)


def leaves_a_broken_graph(module, options):
    next(n for n in module.graph.nodes if n.target is ATEN.exp.default).args = (1, 2, 3)
    return PassResult(1)


def misses_by_one(module, options):
    return PassResult(0, [Refusal("lightning_indexer", "almost", "model.py:3", "do it", near_miss=True)])


def misses_by_far(module, options):
    return PassResult(0, [Refusal("lightning_indexer", "not at all", "model.py:3", "leave it")])


def declared(run, targets=("all",)):
    return Pass(run.__name__, "lightning_indexer", (), (), targets, "exact", run)


@pytest.fixture
def only(monkeypatch):
    def use(*runs):
        monkeypatch.setattr(pipeline, "all_passes", lambda: [declared(run) for run in runs])

    return use


def traced():
    return sketch(lambda x: x.sin().exp(), torch.randn(3, 4)).module


FAILURES = [raises_half_way, changes_the_output, leaves_a_broken_graph]
failures = pytest.mark.parametrize("failing", FAILURES, ids=lambda run: run.__name__)


@failures
def test_a_failing_pass_is_undone(failing, only):
    only(failing)
    module = traced()
    after, (stage,) = run_pipeline(module, Options(), "cpu")
    assert difference(after, traced()) == ""
    assert stage.undone.startswith(f"pass {failing.__name__} was undone: ")
    assert stage.run.changed == 0
    after.recompile()
    x = torch.randn(3, 4)
    torch.testing.assert_close(after(x)[0], x.sin().exp())


@failures
def test_the_passes_around_it_go_on(failing, only):
    only(failing, sin_becomes_cos)
    after, stages = run_pipeline(traced(), Options(), "cpu")
    assert operators(after) == ["cos", "exp"]
    assert [stage.run.changed for stage in stages] == [0, 1]


@failures
def test_it_is_in_the_notes_of_the_report(failing, only):
    only(failing, sin_becomes_cos)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(lambda x: x.sin().exp(), backend="k31", options={"codegen": "ops"})
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x), x.cos().exp())
    (note,) = [note for note in k31compile.last_report().notes if "undone" in note]
    assert failing.__name__ in note


@failures
def test_strict_raises_for_it(failing, only):
    only(failing)
    with pytest.raises(StrictError, match=failing.__name__):
        run_pipeline(traced(), Options(strict=True), "cpu")


def test_the_reason_is_in_the_note(only):
    only(raises_half_way)
    _, (stage,) = run_pipeline(traced(), Options(), "cpu")
    assert stage.undone.endswith("RuntimeError: half way")


def test_strict_raises_for_a_near_miss_with_its_place(only):
    only(misses_by_one)
    with pytest.raises(StrictError, match="almost") as caught:
        run_pipeline(traced(), Options(strict=True), "cpu")
    assert (caught.value.where, caught.value.hint) == ("model.py:3", "do it")


def test_strict_lets_a_far_miss_pass(only):
    only(misses_by_far)
    run_pipeline(traced(), Options(strict=True), "cpu")


def test_strict_raises_for_a_near_miss_of_a_real_pass():
    def program(q, k, w, c, i, *_):
        scores = scored(q, k, w)
        found = scores.topk(4)
        return found.values, found.indices

    module = sketch(program, *OPERANDS.values()).module
    _, stages = run_pipeline(module, Options(), "cpu")
    assert [refusal.near_miss for stage in stages for refusal in stage.result.refused] == [True]
    with pytest.raises(StrictError, match="near miss"):
        run_pipeline(module, Options(strict=True), "cpu")


def test_a_report_takes_what_the_passes_did(only):
    only(misses_by_one, raises_half_way, sin_becomes_cos)
    report = Report()
    _, stages = run_pipeline(traced(), Options(), "cpu")
    add_to_report(report, stages)
    assert [run.changed for run in report.passes] == [0, 0, 1]
    assert [refusal.reason for refusal in report.refused] == ["almost"]
    assert len(report.notes) == 1


def test_a_pass_of_another_target_does_not_run(monkeypatch):
    passes = [declared(sin_becomes_cos, ("ascend-a3",)), declared(misses_by_far, ("cpu", "cuda"))]
    monkeypatch.setattr(pipeline, "all_passes", lambda: passes)
    after, stages = run_pipeline(traced(), Options(), "cpu")
    assert [stage.run.name for stage in stages] == ["misses_by_far"]
    assert operators(after) == ["sin", "exp"]


@pytest.mark.parametrize("fusion", FUSIONS)
def test_fuse_switches_each_pass_on_alone(fusion):
    module = sketch(both_before, *OPERANDS.values()).module
    _, stages = run_pipeline(module, Options(fuse=(fusion,)), "cpu")
    assert [stage.run.name for stage in stages] == [one.name for one in all_passes() if one.fusion == fusion]


@pytest.mark.parametrize("fusion", FUSIONS)
def test_fuse_switches_each_pass_off_alone(fusion):
    module = sketch(both_before, *OPERANDS.values()).module
    others = tuple(name for name in FUSIONS if name != fusion)
    _, stages = run_pipeline(module, Options(fuse=others), "cpu")
    assert [stage.run.name for stage in stages] == [one.name for one in all_passes() if one.fusion != fusion]


@pytest.mark.parametrize("fusion", FUSIONS)
def test_what_is_switched_off_is_not_in_the_report(fusion):
    others = [name for name in FUSIONS if name != fusion]
    with torch.no_grad():
        compiled = torch.compile(both_before, backend="k31", options={"codegen": "ops", "fuse": others})
        got = compiled(*OPERANDS.values())
    torch.testing.assert_close(got, both_before(*OPERANDS.values()), rtol=1e-5, atol=1e-5)
    assert fusion not in k31compile.last_report().fused


def test_an_empty_list_fuses_nothing():
    module = sketch(both_before, *OPERANDS.values()).module
    after, stages = run_pipeline(module, Options(fuse=()), "cpu")
    assert stages == []
    assert after is module
