"""A whole model of somebody else, with caches in pages and state pools: lowered, and what eager gives, call by call."""

import copy
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "strangers"))

from emulated import Emulated
from test_whole import built, load

from k31compile.backend import captured_graph
from k31compile.errors import TargetError
from k31compile.targets.ascend.lower import lower
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.profiles import profile_of

IDS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(5))


def lowered(model, args, kwargs, profile):
    """The lowered graph of a call, and the tensors that it takes."""
    open_session(profile)
    graph, tensors = captured_graph(model, args, kwargs, profile.name)
    return lower(graph, profile), tensors


@pytest.mark.parametrize("target", ["ascend-a3", "ascend-950"])
@torch.no_grad()
def test_a_serving_engines_prefill_and_decode(target):
    module, profile = load("serving_engine"), profile_of(target)
    model = built(module)

    def call(ids, meta, caches):
        """The eager result, after the lowered graph gave the same and left the caches so."""
        ours = copy.deepcopy(caches)
        found, tensors = lowered(model, (ids, meta, ours), {}, profile)
        got = Emulated(found.module).run(*tensors)[0]
        expected = model(ids, meta, caches)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours, caches, rtol=1e-4, atol=1e-4)
        return expected

    assert [phase for phase, _ in module.drive(call, model, IDS)] == ["prefill", "decode"]
    assert {"slot_mapping", "block_tables"} < {field.name for field in fields(module.ForwardMetadata)}


@torch.no_grad()
def test_experts_by_counts_in_a_list_are_refused_with_their_line():
    module = load("builders")
    model = built(module)

    def call(ids, input_pos):
        with pytest.raises(TargetError, match=r"depends on the values of a tensor.*builders.py:186"):
            lowered(model, (ids,), {"input_pos": input_pos}, profile_of("ascend-a3"))
        return model(ids, input_pos=input_pos)

    assert len(list(module.drive(call, model, IDS))) == 2
