"""A decode step through torchair's own conversion: operators, streams, formats, writes in place, and its numbers."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from google.protobuf import text_format

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "examples")]

from ascend_decode import decode  # noqa: E402
from emulated import Emulated  # noqa: E402

from k31compile.cli.entries import shipped_entries  # noqa: E402
from k31compile.errors import OptionError, ScheduleError, TraceError  # noqa: E402
from k31compile.offline import compile_offline  # noqa: E402
from k31compile.passes.schedule.cost_model import load_costs  # noqa: E402
from k31compile.passes.schedule.graph_tasks import tasks_of  # noqa: E402
from k31compile.passes.schedule.tasks import TaskGraph  # noqa: E402
from k31compile.targets.ascend.offline.convert import STREAM  # noqa: E402
from k31compile.targets.ascend.verify_lowered import verify_converted  # noqa: E402

A3, PRODUCT_950 = "ascend-a3", "ascend-950"


@pytest.fixture(scope="module")
def compiled():
    """The example's decode step for A3, compiled once."""
    return compile_offline(decode(), A3)


def test_the_operators_are_torch_npus(compiled):
    counts = compiled.ge.counts()
    assert {name: counts[name] for name in ("LightningIndexer", "SparseFlashAttention", "MoeGatingTopK")} == {
        "LightningIndexer": 2, "SparseFlashAttention": 2, "MoeGatingTopK": 4,
    }  # fmt: skip
    assert counts["GroupedMatmul"] == 12
    provided = {d.operator: d.provider for d in compiled.lowered.decisions}
    assert provided["lightning_indexer"] == provided["sparse_flash_attention"] == "torch_npu"
    assert provided["mega_kda"] == "formula"


def test_caches_are_written_in_place(compiled):
    counts = compiled.ge.counts()
    assert counts["ScatterNdUpdate"] == 12  # two MLA layers of three caches, three KDA layers of two
    assert "TensorMove" not in counts


def test_every_node_is_on_the_stream_of_the_schedule(compiled):
    streams = {node.stream for node in compiled.ge.operators()}
    assert len(streams) == len(compiled.schedule.streams) >= 2
    assert "" in streams
    by_stream = [node.stream for node in compiled.ge.operators() if node.type == "LightningIndexer"]
    tasks = [name for name in compiled.schedule.stream_of if name.startswith("npu_lightning_indexer")]
    expected = [compiled.schedule.stream_of[name] for name in sorted(tasks)]
    assert sorted(by_stream) == sorted("" if stream == 0 else f"k31_stream_{stream}" for stream in expected)


def test_the_schedule_is_not_predicted_to_be_slower_than_one_stream(compiled):
    schedule = compiled.schedule
    assert schedule.critical_path <= schedule.predicted <= schedule.serial


def test_every_wait_and_scope_that_is_dropped_from_the_graph_is_noticed(compiled):
    """GE waits for values by itself; what else the schedule orders hangs on these waits alone."""
    graph, schedule = compiled.lowered.module.graph, compiled.schedule
    costs = load_costs(A3)
    program = TaskGraph(tasks_of(compiled.lowered.module, costs, lambda node: str(node.target).startswith("air.")))
    verify_converted(compiled.lowered.module, schedule, program)
    waits = graph.find_nodes(op="call_function", target=torch.ops.air.wait.default)
    assert waits
    assert sum(len(node.waits_for) for node in compiled.ge.operators()) >= len(waits)
    for wait in waits:
        waited = list(wait.args[0])
        for one in waited:
            wait.args = ([other for other in waited if other is not one],)
            with pytest.raises(ScheduleError):
                verify_converted(compiled.lowered.module, schedule, program)
        wait.args = (waited,)
    enter = next(
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.air.scope_enter.default)
        if STREAM in node.args[0]
    )
    kept = enter.args
    enter.args = (["nothing"], ["nothing"])
    with pytest.raises(ScheduleError):
        verify_converted(compiled.lowered.module, schedule, program)
    enter.args = kept


def formats(definition):
    """The format of each input's Data node, by the input's position."""
    data = [node for node in definition.op if node.type == "Data"]
    return {node.attr["index"].i: node.output_desc[0].attr["format_for_int"].i for node in data}


def test_weights_in_blocks_are_marked_on_their_data_nodes_and_no_others(compiled):
    chosen = {decision.position for decision in compiled.nz if decision.is_nz}
    assert len(chosen) > 40
    marked = {position for position, number in formats(compiled.ge.definition).items() if number == 29}
    assert marked == chosen
    names = {decision.name: decision.reason for decision in compiled.nz if not decision.is_nz}
    assert names
    assert all(names.values())
    assert not {"TransData", "FormatCast", "NPUFormatCast"} & set(compiled.ge.counts())  # cast once, before any graph


def test_the_files_are_what_was_made(compiled, tmp_path):
    paths = {path.name: path for path in compiled.write(tmp_path / "out")}
    read = type(compiled.ge.definition)()
    text_format.Parse(paths["graph.pbtxt"].read_text(), read)
    assert text_format.MessageToString(read) == compiled.ge.text()
    assert any(STREAM in node.attr for node in read.op)
    options = json.loads(paths["options.json"].read_text())
    assert options["compile options"]["global"]["ge.oo.level"] == "O3"
    report = json.loads(paths["report.json"].read_text())
    assert report["streams"] == compiled.to_dict()["streams"]
    assert "nothing was run on an NPU" in report["verified"]


@pytest.mark.parametrize("target", [A3, PRODUCT_950])
def test_the_lowered_graph_computes_what_eager_does(target):
    entry = decode()
    compiled = compile_offline(entry, target)
    eager = copy.deepcopy(entry)
    with torch.no_grad():
        expected = eager.call()
        (got,) = Emulated(compiled.lowered.module).run(*compiled.inputs)
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)
    for ours, theirs in zip(entry.args[1].layers, eager.args[1].layers, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


def test_a_model_of_other_widths_gets_formulas_and_their_reasons():
    (entry,) = shipped_entries("tiny", "decode", "bf16")
    compiled = compile_offline(entry, A3)
    decision = next(d for d in compiled.lowered.decisions if d.operator == "lightning_indexer")
    assert decision.provider == "formula"
    assert "index head dim 128, not 64" in decision.passed_over[0]
    assert "LightningIndexer" not in compiled.ge.counts()


def test_what_is_no_target_is_told():
    with pytest.raises(OptionError, match="there is no Ascend target 'ascend-b2'"):
        compile_offline(decode(), "ascend-b2")


def test_a_model_of_two_graphs_is_refused():
    class Broken(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            torch._dynamo.graph_break()
            return y + 1

    from k31compile import Entry

    with pytest.raises(TraceError, match="not one graph"):
        compile_offline(Entry("broken", Broken(), (torch.zeros(3),)), A3)


def test_a_branch_on_what_values_decide_is_one_line():
    def masked(x, mask):
        chosen = torch.masked_select(x, mask)
        return chosen * 2 if chosen.numel() == 3 else chosen

    from k31compile import Entry

    with pytest.raises(TraceError, match="not one graph"):
        compile_offline(Entry("masked", masked, (torch.zeros(3), torch.ones(3, dtype=torch.bool))), A3)


def test_an_error_of_the_models_own_is_one_line():
    from k31compile import Entry

    with pytest.raises(TraceError, match="not one graph"):
        compile_offline(Entry("wrong", lambda x: x.view(7), (torch.zeros(3),)), A3)
