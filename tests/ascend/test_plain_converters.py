"""Small operators that models write and GE lacks: lowered, converted by torchair, and what eager gives."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parent))

from emulated import Emulated

from k31compile.targets.ascend.converters import has_converter, without_converter
from k31compile.targets.ascend.lower import lower
from k31compile.targets.ascend.offline.convert import convert
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.plain_formulas import COMPOSITES, OURS, TORCHS
from k31compile.targets.ascend.profiles import PROFILES

A3 = PROFILES["ascend-a3"]
ATEN = torch.ops.aten


def put(x, i):
    y = torch.zeros_like(x).index_put((i,), x[i])
    y = ATEN.index_put(y, [None, i], torch.tensor(3.0)).index_put((x > 1,), torch.tensor(0.0))
    return y.index_put((i, i + 1), x[:, 0][i])


PROGRAMS = {
    "vectors": lambda x, i: (x @ x[0], x[:, 0] @ x, x[0] @ x[1], torch.addmv(x[:, 0], x, x[1]), torch.mv(x, x[2])),
    "batches": lambda x, i: (torch.addbmm(x[:, :4], x[None], x.mT[None]), torch.addr(x, x[:, 0], x[0])),
    "booleans": lambda x, i: ((x > 0).all(1), (x > 0).all(), (x > 0) ^ (x < 1), torch.isnan(x), torch.isclose(x, x)),
    "integers": lambda x, i: (i ^ 5, i << 3, i >> 1, torch.fmod(i, 3), i.prod(0), i.min()),
    "rounding": lambda x, i: (x.trunc(), x.frac(), torch.fmod(x, 0.3), torch.nan_to_num(x / 0)),
    "reductions": lambda x, i: (x.min(1), x.min(), x.var(1), torch.var_mean(x, 0), torch.std_mean(x, 1), x.prod(1)),
    "cosine": lambda x, i: F.cosine_similarity(x, x.flip(0)),
    "filled": lambda x, i: (x.index_fill(1, i, 2.0), x.index_fill(0, i, x[0, 0])),
    "diagonals": lambda x, i: (x.diagonal(1) * 2, torch.diag_embed(x), x.trace(), torch.diagonal_scatter(x, x[:, 0])),
    "sorted": lambda x, i: (torch.bucketize(x, x[0].sort()[0]), torch.sort(i, stable=True, descending=True)),
    "repeated": lambda x, i: x[:2].repeat_interleave(i, 0, output_size=4),
    "put": put,
    "sums": lambda x, i: torch.zeros(4, 6).index_put((torch.cat((i, i)),), x, accumulate=True),
    "masked": lambda x, i: x.masked_scatter(x > 0, x.flip(1)),
    "activations": lambda x, i: (F.celu(x), F.hardshrink(x), F.softshrink(x), torch.sinc(x)),
    "logarithms": lambda x, i: (torch.logaddexp(x, x.flip(1)), torch.xlogy(x.abs(), x.abs()), x.lerp(x + 1, x)),
    "losses": lambda x, i: (F.smooth_l1_loss(x, x * 2), F.binary_cross_entropy_with_logits(x, (x > 0).float())),
    "moved": lambda x, i: (torch.rot90(x), F.interpolate(x[None], scale_factor=2), F.pad(x[None], (1, 2), "reflect")),
    "counted": lambda x, i: (torch.count_nonzero(x > 0, 1), torch.isin(i, i[:1]), torch.heaviside(x, x[0])),
    "blocks": lambda x, i: (F.pixel_shuffle(x.view(1, 4, 2, 3), 2), torch.cross(x[:, :3], x[:, 3:], dim=1)),
}


@pytest.fixture(scope="module", autouse=True)
def opened():
    open_session(A3)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_converts_and_computes_what_eager_does(name):
    x, i = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 1])

    def program(x, i):
        result = PROGRAMS[name](x, i)
        return torch.utils._pytree.tree_leaves(result)

    graph = make_fx(program, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(x, i)
    lowered = lower(graph, A3)
    assert without_converter(lowered.module.graph) == {}
    assert convert(lowered.module, lowered.inputs).counts()
    got, expected = Emulated(lowered.module).run(x, i), program(x, i)
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


# Its converter stops at a limit that is not given.
BROKEN = (ATEN.nan_to_num.default,)


def test_none_of_these_is_converted_without_us():
    assert [str(one) for one in (*OURS, *TORCHS) if has_converter(one) and one not in BROKEN] == []


def test_a_composite_is_one_that_torch_writes_by_what_is_not_converted():
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(one.name(), "CompositeImplicitAutograd")
               for one in COMPOSITES)  # fmt: skip
