"""`torch.compile(model, backend="k31", options={"target": "ascend-a3"})` up to torchair's compiler: no NPU is here."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from emulated import Emulated

import k31compile
from k31compile.errors import TargetError
from k31compile.targets.ascend import cast_weights as ascend
from k31compile.targets.ascend import device
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.profiles import profile_of


class Layer(nn.Module):
    """Two products with something between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x))) + x


class Compiler:
    """In the place of torchair's: keeps what it was given, and runs it by our definitions."""

    def __init__(self):
        self.given = []

    def __call__(self, module, example_inputs):
        self.given.append((module, example_inputs))
        return Emulated(module).run


@pytest.fixture
def npu(monkeypatch):
    """A machine whose device is not asked for; its torchair compiles with `Compiler` and casts are counted."""
    open_session(profile_of("ascend-a3"))
    import torchair

    compiler, casts = Compiler(), []

    def cast(tensor, number):
        casts.append((tuple(tensor.shape), number))
        return tensor.clone()

    monkeypatch.setattr(torchair, "get_compiler", lambda config: compiler)
    monkeypatch.setattr(ascend, "_npu_format_cast", lambda: cast)
    # The tensors of this machine are on its CPU.
    monkeypatch.setattr(device, "_check_device", lambda *_: None)
    compiler.casts = casts
    return compiler


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="k31", options={"target": "ascend-a3", **options})


def test_torchair_gets_the_lowered_graph_and_weights_are_cast_once(npu):
    model, x = Layer().bfloat16().eval(), torch.randn(4, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        call = compiled(model)
        got = call(x)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        assert torch.equal(call(x), got)
        compiled(model)(x)
    (module, inputs), _ = npu.given
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == 2
    assert any(value is model.up.weight for value in inputs)
    assert npu.casts == [((128, 64), 29), ((64, 128), 29)]
    report = k31compile.last_report()
    assert report.schedule["predicted"] == pytest.approx(report.schedule["serial"]), "a chain"
    assert {row["layout"] for row in report.weights} == {"nz"}


def test_layout_nd_casts_nothing(npu):
    with torch.no_grad():
        compiled(Layer().bfloat16().eval(), layout="nd")(torch.randn(4, 64, dtype=torch.bfloat16))
    assert npu.casts == []


def test_streams_1_writes_no_scope(npu):
    with torch.no_grad():
        compiled(Layer().bfloat16().eval(), streams=1, super_kernel=False)(torch.randn(4, 64, dtype=torch.bfloat16))
    ((module, _),) = npu.given
    assert not [node for node in module.graph.nodes if "scope" in str(node.target)]


def test_without_an_npu_the_error_says_what_to_do(monkeypatch):
    open_session(profile_of("ascend-a3"))
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    with torch.no_grad(), pytest.raises(Exception, match=r"needs an NPU, and there is none.*--offline"):
        compiled(Layer().eval())(torch.randn(4, 64))


def test_another_product_and_other_places_are_refused(monkeypatch):
    open_session(profile_of("ascend-a3"))
    monkeypatch.setattr(torch.npu, "is_available", lambda: True)
    monkeypatch.setattr(torch.npu, "get_device_name", lambda *_: "Ascend950PR")
    with pytest.raises(TargetError, match=r"is for Ascend910_93\*, and the device is Ascend950PR"):
        device._check_device(profile_of("ascend-a3"), ())
    with pytest.raises(TargetError, match=r"shape \[2\] is on cpu, and the target is ascend-950"):
        device._check_device(profile_of("ascend-950"), (torch.zeros(2),))


class Keeping(nn.Module):
    """A cache of rows: it gives back what it holds, part of it, turned, and as it is now."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(5, 8))

    def forward(self, row, place):
        self.cache[place] = row
        return self.cache[1:4], self.cache.mT, self.cache, self.cache.clone(), self.cache.reshape(40), row.view(-1) * 1


def test_a_returned_part_of_a_cache_is_that_part_and_no_copy(npu):
    """In GE a view is a copy: who keeps one would not see the next write, and his own would be lost."""
    ours, theirs = Keeping(), Keeping()
    call, kept = compiled(ours), []
    with torch.no_grad():
        for step in range(3):
            given = torch.randn(1, 8), torch.tensor([step])
            kept.append((call(*given), theirs(*given)))
            for got, expected in kept:
                torch.testing.assert_close(got, expected, rtol=0, atol=0)
        for got, expected in kept[:1]:
            got[0].fill_(7.0)
            expected[0].fill_(7.0)
            assert got[2] is ours.cache
        torch.testing.assert_close(ours.cache, theirs.cache, rtol=0, atol=0)
        torch.testing.assert_close(call(*given), theirs(*given), rtol=0, atol=0)


def test_a_graph_that_returns_no_view_is_torchairs_call(npu):
    from k31compile.targets.ascend.returned_views import give_views

    call = Layer().forward
    assert give_views(call, []) is call
