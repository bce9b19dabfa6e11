"""What GE has no converter for is named at once and with its lines; what a formula stands for converts."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parent))

from emulated import Emulated

from k31compile import Entry
from k31compile.errors import TargetError
from k31compile.offline import compile_offline
from k31compile.targets.ascend.converters import has_converter, without_converter
from k31compile.targets.ascend.decompositions import OURS
from k31compile.targets.ascend.lower import lower
from k31compile.targets.ascend.offline.convert import convert
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.profiles import PROFILES, Profile

A3 = PROFILES["ascend-a3"]
ATEN = torch.ops.aten
X = torch.randn(4, 6)

CONVERTED = {
    "softplus": lambda x: torch.nn.functional.softplus(x),
    "amin": lambda x: x.amin(1),
    "exp2": lambda x: x.exp2(),
    "roll": lambda x: x.roll(2, 1),
    "eye": lambda x: x @ torch.eye(6),
    "index_copy": lambda x: x.index_copy(0, torch.arange(1, 3), x[:2] * 2),
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "histc": lambda x: x.histc(5, -1, 1),
    "stable sort": lambda x: (x * 4).to(torch.int64).sort(stable=True).indices,
    "one_hot": lambda x: torch.nn.functional.one_hot((x > 0).to(torch.int64), 3),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 4, 6)] * 3, is_causal=True),
    "in place": lambda x: x.add_(1) * 2,
}


@pytest.fixture(scope="module", autouse=True)
def opened():
    open_session(A3)


def graph_of(program, *inputs):
    return make_fx(program, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_formula_of_ours_converts_whole(name):
    lowered = lower(graph_of(lambda x: (CONVERTED[name](x),), X.clone()), A3)
    assert without_converter(lowered.module.graph) == {}
    assert convert(lowered.module, lowered.inputs).counts()


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_a_write_along_a_dimension_of_a_cache_is_one_scatter_in_place(dim):
    def program(cache, new):
        cache.index_copy_(dim, torch.arange(1, 3), new)
        return (cache * 2,)

    cache, source = torch.randn(4, 5, 3), torch.randn(2, 5, 3) if dim == 0 else torch.randn(4, 2, 3)
    lowered = lower(graph_of(program, cache.clone(), source), A3)
    counts = convert(lowered.module, lowered.inputs).counts()
    assert counts["ScatterNdUpdate"] == 1
    assert "TensorMove" not in counts
    ours, theirs = cache.clone(), cache.clone()
    (got,), (expected,) = Emulated(lowered.module).run(ours, source), program(theirs, source)
    assert torch.equal(got, expected)
    assert torch.equal(ours, theirs)


def test_none_of_ours_is_converted_without_us():
    # The converter of one is for a threshold of 20, that of the other stops at a limit that is not given.
    known = (ATEN.softplus.default, ATEN.nan_to_num.default)
    assert [str(operator) for operator in OURS if has_converter(operator) and operator not in known] == []


def test_all_that_cannot_be_converted_is_named_at_once():
    def program(x):
        return x.erfc(), torch.linalg.inv_ex(x[:, :4]).inverse, x.erfc(), x + 1

    with pytest.raises(TargetError) as caught:
        lower(graph_of(program, X), A3)
    told = str(caught.value)
    assert "K31-0401" in told
    assert "aten.erfc.default" in told
    assert "aten.linalg_inv_ex.default" in told
    assert "npugraph_ex" in told


def test_the_models_own_lines_are_named():
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.special.erfc(x * 2)

    with pytest.raises(TargetError, match=r"aten\.special_erfc\.default|aten\.erfc\.default") as caught:
        compile_offline(Entry("foreign", Model().eval(), (X,)), A3.name)
    assert re.search(r"ascend/test_converters\.py:\d+", str(caught.value))


def test_a_graph_for_npugraph_ex_may_hold_any_operator():
    eager = Profile(**{**vars(A3), "path": "npugraph_ex"})
    module = lower(graph_of(lambda x: x.erfc(), X), eager).module
    assert list(without_converter(module.graph)) == ["aten.erfc.default"]


def test_what_torchair_converts_is_known():
    for operator in (
        ATEN.mm.default,
        ATEN.exp.default,
        ATEN.gather.default,
        torch.ops.npu.npu_lightning_indexer.default,
    ):
        assert has_converter(operator)
    for operator in (ATEN.index_put.default, ATEN.erfc.default, ATEN.frexp.Tensor, ATEN.bincount.default):
        assert not has_converter(operator)
