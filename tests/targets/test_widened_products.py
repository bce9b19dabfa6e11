"""Products of bfloat16 weights run in float32 where the machine has none of bfloat16, and nothing else changes."""

import copy

import pytest
import torch
from torch import nn

from k31compile import last_report
from k31compile.targets import skinny_linears, widened_products


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def without_bfloat16(monkeypatch):
    for step in (skinny_linears, widened_products):
        monkeypatch.setattr(step, "packed_dtype", lambda dtype: torch.float32)


@pytest.fixture
def with_bfloat16(monkeypatch):
    for step in (skinny_linears, widened_products):
        monkeypatch.setattr(step, "packed_dtype", lambda dtype: dtype)


class Heads(nn.Module):
    """A projection of each head, as einsum and as bmm, and one whose weight lies the other way round."""

    def __init__(self, heads=3, width=40, inner=56):
        super().__init__()
        self.up = nn.Parameter(torch.randn(heads, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(heads * width, inner) * inner**-0.5)
        self.right = nn.Parameter(torch.randn(width, inner) * width**-0.5)
        self.heads = heads

    def forward(self, x):
        one = torch.einsum("btw,hwi->bthi", x, self.up)
        two = one.permute(0, 2, 1, 3) @ self.down.unflatten(0, (self.heads, -1)).mT
        return one + (x @ self.right)[:, :, None], two


def run(model, x, codegen="ops"):
    with torch.no_grad():
        got = torch.compile(model, backend="k31", options={"codegen": codegen, "cache": False}, dynamic=False)(x)
    (note,) = [note for note in last_report().notes if "run in float32" in note] or ["0"]
    return got, int(note.split()[0])


@pytest.mark.usefixtures("without_bfloat16")
@pytest.mark.parametrize("codegen", ["ops", pytest.param("inductor", marks=pytest.mark.slow)])
def test_results_are_rounded_once(codegen):
    torch.manual_seed(0)
    model, x = Heads().bfloat16(), torch.randn(2, 67, 40).bfloat16()
    got, count = run(model, x, codegen)
    assert count == 3
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double())
        eager = model(x)
    for one, right, plain in zip(got, want, eager, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (torch.bfloat16, plain.shape, plain.stride())
        torch.testing.assert_close(one.double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("without_bfloat16")
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Heads().bfloat16(), torch.randn(1, 3, 40).bfloat16()),
        (Heads(), torch.randn(2, 67, 40)),
        (nn.Linear(64, 64).bfloat16(), torch.randn(67, 64).bfloat16()),
    ],
    ids=["few rows", "float32", "taken by a kernel"],
)
def test_others_stay(model, x):
    assert run(model, x)[1] == 0


@pytest.mark.usefixtures("without_bfloat16")
def test_products_of_no_weight_stay():
    class Scores(nn.Module):
        def forward(self, x):
            y = x * 2
            return y @ y.mT

    assert run(Scores(), torch.randn(2, 67, 40).bfloat16())[1] == 0


@pytest.mark.usefixtures("with_bfloat16")
def test_a_machine_with_bfloat16_multiplies_it():
    assert run(Heads().bfloat16(), torch.randn(2, 67, 40).bfloat16())[1] == 0


@pytest.mark.usefixtures("without_bfloat16")
def test_autocast_stays():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(Heads().bfloat16(), torch.randn(2, 67, 40).bfloat16())[1] == 0
