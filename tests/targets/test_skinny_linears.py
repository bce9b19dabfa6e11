"""Products of a few rows, and those of bfloat16 on machines without it, read weights where they lie; others stay."""

import copy

import pytest
import torch
from torch import nn

from k31compile import last_report
from k31compile.kernels.cpu.direct_calls import count_calls
from k31compile.kernels.registry import Choice, provider_for
from k31compile.targets import skinny_linears


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """A machine with products of bfloat16, whatever this one has."""
    if not provider_for("skinny_linear").provider.startswith("cpu-"):
        pytest.skip("the kernels are not built here")
    torch._dynamo.reset()
    monkeypatch.setattr(skinny_linears, "packed_dtype", lambda dtype: dtype)
    yield
    torch._dynamo.reset()


@pytest.fixture
def without_bfloat16(monkeypatch):
    monkeypatch.setattr(skinny_linears, "packed_dtype", lambda dtype: torch.float32)


class Odd(nn.Module):
    """A layer with a bias, one without, and products that are written by hand."""

    def __init__(self, depth=320, inner=203):
        super().__init__()
        self.up, self.down = nn.Linear(depth, inner), nn.Linear(inner, depth, bias=False)
        self.left = nn.Parameter(torch.randn(130, depth) / depth**0.5)
        self.added = nn.Parameter(torch.randn(130))

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        flat = y.reshape(-1, y.shape[-1])
        return torch.addmm(self.added, flat, self.left.t()) + flat @ self.left.t()


def run(model, x, codegen="ops", dynamic=False, **options):
    """The result, and how many products the report names."""
    with torch.no_grad():
        compiled = torch.compile(model, backend="k31", options={"codegen": codegen, **options}, dynamic=dynamic)
        got = compiled(x)
    told = last_report().providers.get("skinny_linear", {"why": "0"})
    return got, int(told["why"].split()[0])


def served():
    return count_calls("skinny_linear")[0]


@pytest.mark.parametrize("codegen", ["ops", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(1, 320), (3, 1, 320), (320,)], ids=str)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 4e-2), (torch.float32, 1e-5)], ids=["bf16", "fp32"])
def test_the_result_is_that_of_torch(codegen, shape, dtype, allowed):
    torch.manual_seed(0)
    model, x = Odd().to(dtype).eval(), torch.randn(*shape).to(dtype)
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double())
    before = served()
    got, count = run(model, x, codegen)
    assert count == 4
    assert served() - before >= 4
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=allowed, atol=allowed)


class Chain(nn.Module):
    """Products that read each other; weights come in the order of their names, not of their use."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x):
        return self.second(self.first(self.third(x)))


def test_products_of_products():
    model, x = Chain().eval(), torch.randn(2, 256)
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double())
    got, count = run(model, x)
    assert count == 3
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_what_changes_in_a_weight_is_seen():
    model, x = nn.Linear(256, 256).bfloat16().eval(), torch.randn(1, 256).bfloat16()
    with torch.no_grad():
        compiled = torch.compile(model, backend="k31", options={"codegen": "ops"}, dynamic=False)
        first = compiled(x)
        model.weight.data.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
        assert not torch.equal(compiled(x), first)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Linear(256, 256).bfloat16(), torch.randn(9, 256).bfloat16()),
        (nn.Linear(256, 256).double(), torch.randn(1, 256).double()),
        (nn.Linear(256, 256).half(), torch.randn(1, 256).half()),
        (nn.Linear(64, 4096).bfloat16(), torch.randn(1, 64).bfloat16()),
        (nn.Linear(256, 100).bfloat16(), torch.randn(1, 256).bfloat16()),
        (nn.Linear(256, 256).bfloat16(), torch.randn(0, 256).bfloat16()),
    ],
    ids=["many rows", "float64", "float16", "tiny depth", "small", "no rows"],
)
def test_others_stay(model, x):
    got, count = run(model.eval(), x)
    assert count == 0
    with torch.no_grad():
        torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)


def test_a_weight_that_lies_the_other_way_stays():
    class Right(nn.Module):
        def __init__(self):
            super().__init__()
            self.right = nn.Parameter(torch.randn(256, 256).bfloat16())

        def forward(self, x):
            return x @ self.right

    assert run(Right(), torch.randn(1, 256).bfloat16())[1] == 0


def test_dynamic_rows_stay():
    assert run(nn.Linear(256, 256).bfloat16(), torch.randn(3, 256).bfloat16(), dynamic=True)[1] == 0


@pytest.mark.parametrize("codegen", ["ops", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(1, 320), (9, 320), (2, 37, 320), (1100, 320)], ids=str)
@pytest.mark.usefixtures("without_bfloat16")
def test_bfloat16_of_any_rows_where_the_machine_has_none(codegen, dynamic, shape):
    torch.manual_seed(0)
    model, x = Odd().bfloat16().eval(), torch.randn(*shape).bfloat16()
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double())
    before = served()
    got, count = run(model, x, codegen, dynamic)
    assert count == 4
    assert served() - before >= 4
    torch.testing.assert_close(got.double(), want, rtol=4e-2, atol=4e-2)


@pytest.mark.usefixtures("without_bfloat16")
def test_other_rows_meet_the_same_graph():
    model = Odd().bfloat16().eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend="k31", options={"codegen": "ops"}, dynamic=True)
        for rows in (64, 9, 3, 200):
            x = torch.randn(rows, 320).bfloat16()
            torch.testing.assert_close(compiled(x), model(x), rtol=4e-2, atol=4e-2)
    assert last_report().providers["skinny_linear"]["why"].startswith("4 products")


@pytest.mark.usefixtures("without_bfloat16")
def test_float32_of_many_rows_stays():
    assert run(nn.Linear(256, 256), torch.randn(9, 256))[1] == 0


@pytest.mark.usefixtures("without_bfloat16")
def test_a_weight_of_few_numbers_stays():
    assert run(nn.Linear(31, 31).bfloat16(), torch.randn(9, 31).bfloat16())[1] == 0


def test_autocast_stays():
    model = nn.Linear(256, 256).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(model, torch.randn(1, 256).bfloat16())[1] == 0


def test_no_kernel_no_replacement(monkeypatch):
    monkeypatch.setattr(skinny_linears, "provider_for", lambda name: Choice("torch", ""))
    assert run(nn.Linear(256, 256).bfloat16(), torch.randn(1, 256).bfloat16())[1] == 0


def test_packed_copies_are_for_the_others():
    _, count = run(Odd().bfloat16().eval(), torch.randn(1, 320).bfloat16(), layout="nz")
    assert count == 4
    assert {(row["layout"], row["bytes"]) for row in last_report().weights} == {("nd", 0)}
    assert "few rows" in last_report().weights[0]["reason"]
