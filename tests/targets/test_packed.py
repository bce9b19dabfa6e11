"""layout="nz" on the CPU: packed copies beside the weights, that follow them, and nothing else changes."""

import copy
import gc
import time

import pytest
import torch
from torch import nn

import k31compile
from k31compile import last_report
from k31compile.targets.packed_linear import PACKED_LINEAR
from k31compile.targets.packed_weights import PACKED, packed_dtype

ALONE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    PACKED.clear()
    yield
    torch._dynamo.reset()


def compiled(model, codegen="ops", **options):
    return torch.compile(model, backend="k31", options={"layout": "nz", "codegen": codegen, **options})


def called(function, *arguments):
    with torch.no_grad():
        return function(*arguments)


class Odd(nn.Module):
    """Linear layers at odd sizes, with and without bias, and products that are written by hand."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(33, 17), nn.Linear(17, 48, bias=False)
        self.right = nn.Parameter(torch.randn(48, 21) / 7)
        self.left = nn.Parameter(torch.randn(5, 21) / 5)
        self.added = nn.Parameter(torch.randn(5))

    def forward(self, x):
        y = self.down(torch.relu(self.up(x))) @ self.right
        return torch.addmm(self.added, y.reshape(-1, 21), self.left.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codegen", ["ops", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_result_is_that_of_plain_weights(dtype, codegen):
    torch.manual_seed(0)
    model, x = Odd().to(dtype).eval(), torch.randn(2, 3, 33, dtype=dtype)
    expected = called(copy.deepcopy(model).double(), x.double())
    got = called(compiled(model, codegen), x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=ALONE[dtype], atol=ALONE[dtype])
    assert PACKED.made >= 4
    report = last_report()
    assert [(row["layout"], row["reason"]) for row in report.weights] == 4 * [("nz", "")]
    assert {row["name"] for row in report.weights} == {"up.weight", "down.weight", "right", "left"}
    assert PACKED.nbytes() >= sum(row["bytes"] for row in report.weights) > 0
    assert any("4 of 4 weights get a copy packed for oneDNN" in note for note in report.notes)


def test_auto_packs_nothing():
    model, x = Odd().eval(), torch.randn(3, 33)
    before = PACKED.made
    called(torch.compile(model, backend="k31", options={"codegen": "ops"}), x)
    assert PACKED.made == before
    assert last_report().weights == []


@pytest.mark.parametrize("sides", [(64, 1), (1, 64), (360, 48), (33, 17)])
def test_sides_that_made_others_crash(sides):
    """Row F1: they stay plain or are padded by oneDNN, with the result of the plain weight, and the report says why."""
    model, x = nn.Linear(*sides).eval(), torch.randn(3, sides[0])
    got = called(compiled(model), x)
    torch.testing.assert_close(got, called(model, x))
    (row,) = last_report().weights
    assert (row["layout"] == "nd") is (1 in sides)
    assert ("a side of" in row["reason"]) is (1 in sides)
    assert 1 not in sides or "stays as it is: a side of" in str(last_report())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 24), nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight
        self.again = nn.Linear(24, 40, bias=False)
        self.again.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x) + self.again(x.sin())


def test_a_tied_weight_is_packed_once_whoever_compiles_how_often():
    """Row F3: two layers of one tensor, two compiles, and calls again."""
    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.arange(5)
    expected, before = called(model, ids), PACKED.made
    for _ in range(2):
        torch._dynamo.reset()
        call = compiled(model)
        for _ in range(3):
            torch.testing.assert_close(called(call, ids), expected)
    assert PACKED.made == before + 1


@pytest.mark.parametrize("codegen", ["ops", "inductor"])
def test_new_values_are_packed_again_and_the_parameter_stays_itself(codegen, tmp_path):
    """Row F4: identity, name, shape, attributes, state dict; load_state_dict, writes in place, replaced data."""
    torch.manual_seed(0)
    model, x = Odd().eval(), torch.randn(2, 3, 33)
    model.up.weight.mine = "kept"
    before = {name: (id(p), p.shape, p.stride(), p.data_ptr()) for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    call = compiled(model, codegen)
    torch.testing.assert_close(called(call, x), called(model, x))
    assert before == {name: (id(p), p.shape, p.stride(), p.data_ptr()) for name, p in model.named_parameters()}
    assert model.up.weight.mine == "kept"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    def new_values():
        model.load_state_dict(Odd().state_dict())

    def replaced_data():
        model.up.weight.data = torch.randn(17, 33)

    def past_the_counter():
        model.down.weight.data.copy_(torch.randn(48, 17))

    def another_parameter():
        model.up.weight = nn.Parameter(torch.randn(17, 33))

    def in_place():
        with torch.no_grad():
            model.right.mul_(3.0)

    for change in (new_values, in_place, replaced_data, past_the_counter, another_parameter):
        old = called(model, x)
        change()
        expected = called(model, x)
        assert not torch.allclose(old, expected)
        torch.testing.assert_close(called(call, x), expected, msg=change.__name__)


def test_memory_goes_with_the_weights():
    model = nn.Linear(64, 64).eval()
    called(compiled(model), torch.randn(2, 64))
    assert PACKED.nbytes() >= 64 * 64 * 4
    del model
    torch._dynamo.reset()
    gc.collect()
    assert PACKED.nbytes() == 0


class Others(nn.Module):
    def __init__(self):
        super().__init__()
        self.cast, self.part = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 16))
        self.stack, self.whole = nn.Parameter(torch.randn(2, 8, 8)), nn.Linear(8, 8)
        self.number = nn.Parameter(torch.randn(8, 8).double())

    def forward(self, x):
        y = x @ self.cast.double().float() + x @ self.part[:, :8] + torch.bmm(x.expand(2, *x.shape), self.stack).sum(0)
        return self.whole(y) + (x.double() @ self.number).float()


def test_what_is_not_packed_has_its_reason():
    torch.manual_seed(0)
    model, x = Others().eval(), torch.randn(3, 8)
    torch.testing.assert_close(called(compiled(model), x), called(model, x))
    rows = {row["name"]: row for row in last_report().weights}
    assert rows["whole.weight"]["layout"] == "nz"
    assert "a batch of it" in rows["stack"]["reason"]
    assert "float64" in rows["number"]["reason"]
    assert "a cast" in rows["cast"]["reason"]
    assert rows["part"]["layout"] == "nd"


def test_weights_made_in_inference_mode_have_no_counter_and_run_plain():
    with torch.inference_mode():
        model = nn.Linear(8, 8).eval()
        x, before = torch.randn(3, 8), PACKED.made
        torch.testing.assert_close(compiled(model)(x), model(x))
    assert PACKED.made == before


def test_layers_that_are_nested_regions_are_packed_too():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model, x, before = Stack().eval(), torch.randn(3, 16), PACKED.made
    call = k31compile.compile(model, layout="nz", codegen="ops")
    torch.testing.assert_close(called(call, x), called(model, x))
    assert PACKED.made == before + 6


def test_one_row_reads_the_weight_itself_where_a_copy_would_be_slower():
    model, x, before = nn.Linear(9, 7).eval(), torch.randn(1, 9), PACKED.made
    assert torch.equal(called(compiled(model), x), called(model, x))
    assert PACKED.made == before


def test_the_child_that_builds_knows_the_operator(monkeypatch, tmp_path):
    from k31compile.targets import tiered
    from k31compile.targets.builder import Builder

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    builder = Builder()
    monkeypatch.setattr(tiered, "BUILDER", builder)
    try:
        torch.manual_seed(0)
        model, x = Odd().eval(), torch.randn(2, 3, 33)
        call, end = compiled(model, "tiered"), time.monotonic() + 300
        called(call, x)
        while last_report().tier == "ops" and time.monotonic() < end:
            time.sleep(0.1)
            called(call, x)
        assert last_report().tier == "inductor", last_report().notes
        torch.testing.assert_close(called(call, x), called(model, x))
        model.load_state_dict(Odd().state_dict())
        torch.testing.assert_close(called(call, x), called(model, x))
    finally:
        builder.stop()


def test_no_rows_and_vectors_are_fine():
    model = nn.Linear(9, 7).eval()
    for shape in ((0, 9), (9,), (2, 0, 9)):
        x = torch.randn(shape)
        assert torch.equal(called(PACKED_LINEAR, x, model.weight, model.bias, False), called(model, x)) or x.dim() == 1
        assert called(PACKED_LINEAR, x, model.weight, model.bias, False).shape == (*shape[:-1], 7)


def test_the_operator_and_its_fake_agree():
    weight, bias = torch.randn(7, 9), torch.randn(7)
    for arguments in ((torch.randn(3, 9), weight, bias, False), (torch.randn(3, 7), weight, None, True)):
        torch.library.opcheck(PACKED_LINEAR, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_copy_has_the_dtype_in_which_this_machine_multiplies():
    assert packed_dtype(torch.float32) == torch.float32
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert packed_dtype(torch.bfloat16) == (torch.bfloat16 if supported else torch.float32)


@pytest.mark.parametrize("codegen", ["ops", pytest.param("inductor", marks=pytest.mark.slow)])
def test_under_autocast_nothing_is_packed_and_the_dtype_is_autocasts(codegen):
    model, x = nn.Linear(32, 32), torch.randn(4, 32)
    run = compiled(model, codegen)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = called(run, x), called(model, x)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(got, expected)
    (row,) = last_report().weights
    assert row["layout"] == "nd"
    assert row["reason"].startswith("autocast decides")
    torch.testing.assert_close(called(run, x), called(model, x))
    assert last_report().weights[0]["layout"] == "nz"
