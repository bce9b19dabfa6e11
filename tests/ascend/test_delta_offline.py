"""KDA through torchair's own conversion: our node in place, torch_npu's with a bfloat16 state, and a whole prefill."""

import copy
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "examples")]

from ascend_decode import decode  # noqa: E402
from emulated import Emulated  # noqa: E402

from k31compile.backend import captured_graph  # noqa: E402
from k31compile.cli.entries import shipped_entries  # noqa: E402
from k31compile.kernels.registry import OPERATORS  # noqa: E402
from k31compile.offline import compile_offline  # noqa: E402
from k31compile.targets.ascend.lower import lower  # noqa: E402
from k31compile.targets.ascend.offline.convert import convert  # noqa: E402
from k31compile.targets.ascend.offline.session import open_session  # noqa: E402
from k31compile.targets.ascend.own_operators import GE_TYPE  # noqa: E402
from k31compile.targets.ascend.profiles import PROFILES  # noqa: E402

A3 = PROFILES["ascend-a3"]
OURS = dataclasses.replace(A3, own_operators=frozenset({"kda_recurrent"}))


def hold_to_eager(entry, eager, module, inputs, bound=3e-2):
    """A lowered graph on the CPU gives what eager gives, and leaves every cache as eager does."""
    with torch.no_grad():
        expected = eager.call()
        (got,) = Emulated(module).run(*inputs)
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
    for ours, theirs in zip(entry.args[1].layers, eager.args[1].layers, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_a_declared_kernel_of_ours_is_one_node_that_steps_the_cache_itself():
    entry = decode()
    eager = copy.deepcopy(entry)
    open_session(OURS)
    with entry.grad_mode():
        module, inputs = captured_graph(entry.model, entry.args, entry.kwargs, OURS.name)
    lowered = lower(module, OURS)
    graph = convert(lowered.module, lowered.inputs)
    layers = [d for d in lowered.decisions if d.operator == "mega_kda"]
    assert [(part.operator, part.provider) for d in layers for part in d.parts] == [("kda_recurrent", "ours")] * 3
    counts = graph.counts()
    assert counts[GE_TYPE] == 3
    assert counts["ScatterNdUpdate"] == 9  # two MLA layers of three caches, three convolutions
    assert "TensorMove" not in counts
    data = {node.name for node in graph.definition.op if node.type in ("Data", "RefData")}
    for node in graph.definition.op:
        if node.type == GE_TYPE:
            (place,) = [i for i, one in enumerate(node.input_desc) if one.name == "state"]
            assert node.input[place].split(":")[0] in data
            assert [one.name for one in node.output_desc] == ["output", "state"]
            assert node.attr["state_layout"].s == b"VK"
    hold_to_eager(entry, eager, lowered.module, inputs)


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("operator", ["kda_recurrent", "gated_delta_recurrent"])
def test_a_model_with_a_bfloat16_state_gets_torch_npus_step(operator, tokens, layout):
    generator = torch.Generator().manual_seed(tokens)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    unit = lambda x: (x / x.norm(dim=-1, keepdim=True)).bfloat16()  # noqa: E731
    rows, inner = (2, tokens, 3), (8, 4) if layout == "KV" else (4, 8)
    gate = -draw(*rows, 8).abs() if operator == "kda_recurrent" else -draw(*rows).abs()
    args = [unit(draw(*rows, 8)), unit(draw(*rows, 8)), draw(*rows, 4).bfloat16(), gate,
            torch.sigmoid(draw(*rows)).bfloat16(), draw(2, 3, *inner).bfloat16()]  # fmt: skip
    call = getattr(torch.ops.k31, operator)
    program = lambda *operands: call(*operands, scale=0.5, state_layout=layout)  # noqa: E731
    open_session(A3)
    lowered = lower(make_fx(program, tracing_mode="fake")(*args), A3)
    (decision,) = lowered.decisions
    assert decision.provider == "torch_npu"
    assert convert(lowered.module, lowered.inputs).counts()["RecurrentGatedDeltaRule"] == 1
    before = args[5].clone()
    got = Emulated(lowered.module).run(*args)
    expected = OPERATORS[operator].reference(*args, scale=0.5, state_layout=layout)
    assert torch.equal(args[5], before)
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("target", list(PROFILES))
def test_a_prefill_of_the_small_model_converts_and_computes_what_eager_does(target):
    (entry,) = shipped_entries("tiny", "prefill", "fp32")
    eager = copy.deepcopy(entry)
    compiled = compile_offline(entry, target)
    kda = [d for d in compiled.lowered.decisions if d.operator == "kda_chunk"]
    assert [d.provider for d in kda] == ["formula"] * 3
    assert all("one gate a head" in " ".join(d.passed_over) for d in kda)
    assert "TensorMove" not in compiled.ge.counts()
    hold_to_eager(entry, eager, compiled.lowered.module, compiled.inputs, bound=1e-4)
