"""An artefact for an Ascend product, made and checked on a machine that has none."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "examples")]

from ascend_decode import decode  # noqa: E402

from k31compile import load  # noqa: E402
from k31compile.ahead import Progress  # noqa: E402
from k31compile.ahead.ascend import Product, make_ascend_artefact  # noqa: E402
from k31compile.cache.artefact.container import open_artefact  # noqa: E402
from k31compile.entry import Entry  # noqa: E402
from k31compile.errors import ArtefactError, CallRefusedError  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The example's decode step for A3 as a file, and its entry."""
    entry = decode()
    file = tmp_path_factory.mktemp("made") / "decode.k31"
    told = make_ascend_artefact([entry], file, Product("ascend-a3"), None, Progress())
    return entry, file, told


def test_it_holds_graph_options_schedule_and_formats(made):
    entry, file, told = made
    opened = open_artefact(file)
    (payload,) = opened.manifest["payloads"]
    assert (payload["kind"], payload["target"]) == ("ascend-ge", "ascend-a3")
    assert payload["versions"]
    folder = payload["folder"]
    assert b"LightningIndexer" in opened.files[f"{folder}/graph.pbtxt"]
    assert json.loads(opened.files[f"{folder}/options.json"])
    assert json.loads(opened.files[f"{folder}/schedule.json"])
    assert any(one["nz"] for one in payload["inputs"])
    weights = {one["weight"] for one in payload["inputs"] if "weight" in one}
    assert weights == set(opened.manifest["tensors"])
    assert told["entries"][entry.name]["fused"]["lightning_indexer"] == 2


def test_it_is_loaded_and_checked_and_refuses_to_run_here(made):
    entry, file, _ = made
    artefact = load(file)
    assert artefact.entries == [entry.name]
    assert artefact.report(entry.name)["target"] == "ascend-a3"
    with (
        torch.no_grad(),
        pytest.raises(CallRefusedError, match=r"is a graph for ascend-a3, made with .* no such NPU here"),
    ):
        artefact(*entry.args, **entry.kwargs)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    broken = file.with_name("broken.k31")
    broken.write_bytes(data)
    with pytest.raises(ArtefactError, match=r"broken\.k31"):
        load(broken)


def test_dynamic_sizes_are_refused(tmp_path):
    entry = Entry("e", torch.nn.Linear(4, 4).eval(), (torch.ones(3, 4),), dynamic={"0": {0: ("N", 2, 9)}})
    with pytest.raises(ArtefactError, match="dynamic sizes are not for Ascend graphs"):
        make_ascend_artefact([entry], tmp_path / "f.k31", Product("ascend-a3"), None, Progress())
