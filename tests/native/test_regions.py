"""Nested regions without Python: what a program of their libraries gives, writes, refuses and lets go."""

import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import k31compile
from k31compile.errors import NativeError
from k31compile.kernels import programs
from k31compile.kernels.programs import BuiltLibrary, Call, OpenProgram, Program, Shape, View
from k31compile.report import clear_reports, last_report
from k31compile.targets.native.build import LIBRARY, build_native

WIDTH = 24


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    clear_reports()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """Writes a state in place, returns the stream and something that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state.mul_(0.5).add_(x.mean(0, keepdim=True))
        return x + torch.tanh(self.linear(x)) * self.gate(state), (x * state).t()


class Stack(nn.Module):
    """Equal layers with states and weights of their own; something stands before, between and behind them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, states: list[Tensor], pool: Tensor) -> tuple[Any, ...]:
        x, seen = x.cos() + 1, []
        for layer, state in zip(self.layers, states, strict=True):
            x, other = layer(x, state)
            seen.append(other)
            x = x + pool[1, : x.shape[0]] if len(seen) == 2 else x
        pool[0].add_(1.0)
        return x, seen, states[0], pool[1], x[0]


def arguments(rows: int = 5, layers: int = 4) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(rows)
    states = [torch.randn(1, WIDTH, generator=generator) for _ in range(layers)]
    return torch.randn(rows, WIDTH, generator=generator), states, torch.randn(2, 9, WIDTH, generator=generator)


def run(model: Callable[..., Any], given: tuple[Any, ...]) -> list[Tensor]:
    """What it returns, and what it left in what it was given."""
    with torch.no_grad():
        return torch.utils._pytree.tree_leaves((model(*given), given))


def hold(model: nn.Module, compiled: Callable[..., Any], *rest: Any) -> None:
    for mine, theirs in zip(run(compiled, arguments(*rest)), run(model, arguments(*rest)), strict=True):
        assert mine.shape == theirs.shape
        assert mine.stride() == theirs.stride()
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def provider() -> str:
    return str(last_report().providers["call_region"]["provider"])


@pytest.mark.slow
def test_states_are_written_where_they_lie_and_each_layer_keeps_its_weights() -> None:
    torch.manual_seed(0)
    model = Stack(4).eval()
    compiled = k31compile.compile(model)
    hold(model, compiled)
    assert last_report().providers["call_region"] == {"provider": "native", "why": "4 libraries, called 8 times"}
    states = arguments()[1]
    places = [state.data_ptr() for state in states]
    with torch.no_grad():
        first = compiled(arguments()[0], states, arguments()[2])
        assert first[2] is states[0]
        assert [state.data_ptr() for state in states] == places
        model.layers[2].linear.weight.mul_(-2.0)
        model.layers[1].gate.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    hold(model, compiled)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    hold(other, k31compile.compile(other))
    hold(model, compiled)


@pytest.mark.slow
def test_threads_run_one_program_side_by_side() -> None:
    torch.manual_seed(0)
    model = Stack(4).eval()
    compiled = k31compile.compile(model, guards="none")
    want = run(model, arguments())
    run(compiled, arguments())
    assert provider() == "native"
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(30):
            got = run(compiled, arguments())
            wrong.extend(1 for a, b in zip(got, want, strict=True) if not torch.allclose(a, b, atol=1e-5))

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not wrong


class WritesAView(Stack):
    """Its layers write into rows of one pool: no input of the graph by itself."""

    def forward(self, x: Tensor, states: list[Tensor], pool: Tensor) -> Any:  # type: ignore[override]
        for i, layer in enumerate(self.layers):
            x, _ = layer(x, pool[i % 2, i : i + 1])
        return x


class ReadsOld(Stack):
    """All layers write one state, and between them something looks at it through a view from before."""

    def forward(self, x: Tensor, states: list[Tensor], pool: Tensor) -> Any:  # type: ignore[override]
        old, first = states[0][:, :3], states[0] + 1
        for layer in self.layers:
            x, _ = layer(x, states[0])
            x = x + old.sum()
        return x, old, first


@pytest.mark.parametrize("layout", ["nd", "nz"])
def test_what_looks_unused_and_writes_is_not_dropped(layout: str) -> None:
    torch.manual_seed(1)
    model = Stack(3).eval()
    hold(model, k31compile.compile(model, codegen="ops", layout=layout), 5, 3)


@pytest.mark.slow
def test_one_state_is_written_by_one_layer_after_the_other() -> None:
    torch.manual_seed(1)
    model = ReadsOld(3).eval()
    hold(model, k31compile.compile(model))
    assert provider() == "native"


@pytest.mark.slow
def test_parts_of_a_tensor_are_written_by_inductor() -> None:
    torch.manual_seed(1)
    model = WritesAView(3).eval()
    hold(model, k31compile.compile(model))
    assert provider() == "inductor"
    assert "writes into a part of a tensor" in last_report().providers["call_region"]["why"]


@pytest.mark.slow
def test_dynamic_sizes_go_to_inductor() -> None:
    torch.manual_seed(1)
    model = Stack(3).eval()
    compiled = k31compile.compile(model)
    hold(model, compiled, 5, 3)
    assert provider() == "native"
    hold(model, compiled, 6, 3)
    hold(model, compiled, 7, 3)
    assert provider() == "inductor"
    hold(model, compiled, 5, 3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_casts_once(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    model = Stack(3).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        want, got = (run(one, arguments(5, 3)) for one in (model, k31compile.compile(model)))
    assert provider() == "native"
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.allclose(mine, theirs, atol=5e-2 if dtype is torch.bfloat16 else 1e-5)


def test_without_torchs_headers_no_program_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "available", lambda: (True, "called through Python: no headers"))
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False)
    with pytest.raises(NativeError, match="no headers"):
        OpenProgram(Program(0))


def scaled(x: Tensor, state: Tensor) -> Any:
    made = x * 2, x.sum(0)
    state += x
    return made


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> BuiltLibrary:
    """One library by itself: [3, 4] and a state of that shape, to twice the first and its sum over rows."""
    from k31compile.graph.trace import trace_functional

    if not programs.available()[0]:
        pytest.skip("the kernels are not built here")
    folder: Path = tmp_path_factory.mktemp("library")

    def backend(module: Any, inputs: Any) -> Any:
        build_native(trace_functional(module, inputs), inputs, folder)
        return module.forward

    with torch.no_grad():
        torch.compile(scaled, backend=backend, dynamic=False)(torch.randn(3, 4), torch.randn(3, 4))
    shape = Shape((3, 4), (4, 1), torch.float32)
    return BuiltLibrary(folder / LIBRARY, (shape, shape), (1,), (shape, Shape((4,), (1,), torch.float32)))


@pytest.fixture
def opened(library: BuiltLibrary) -> OpenProgram:
    """Twice in a row, then a view of what came out."""
    view = View(4, 6, Shape((2, 2), (4, 1), torch.float32), 5)
    steps = [Call(0, [0, 1], [2, 3]), Call(0, [2, 1], [4, 5]), view]
    return OpenProgram(Program(2, [library], steps, [4, 5, 6]))


@pytest.mark.slow
def test_a_program_calls_and_views_in_order(opened: OpenProgram) -> None:
    x, state = torch.randn(3, 4), torch.randn(3, 4)
    want_state = state + 3 * x
    twice, total, view = opened([x, state])
    assert torch.allclose(twice, 4 * x)
    assert torch.allclose(total, 2 * x.sum(0), atol=1e-6)
    assert torch.allclose(state, want_state, atol=1e-6)
    assert torch.equal(view, twice[1:, 1:3])
    assert view.untyped_storage().data_ptr() == twice.untyped_storage().data_ptr()


@pytest.mark.slow
def test_what_a_library_was_not_built_for_is_copied_or_refused(opened: OpenProgram) -> None:
    x, state = torch.randn(4, 3).t(), torch.zeros(3, 4)
    assert torch.allclose(opened([x, state])[0], 4 * x)
    with pytest.raises(RuntimeError, match="written and lies otherwise"):
        opened([torch.randn(3, 4), torch.zeros(4, 3).t()])
    for wrong in (torch.randn(4, 4), torch.randn(3, 4).double(), torch.randn(12), torch.randn(3, 4, device="meta")):
        with pytest.raises(RuntimeError, match="not what it was built for"):
            opened([wrong, state])
    with pytest.raises(RuntimeError, match="a program takes 2 tensors"):
        opened([x])


@pytest.mark.slow
def test_libraries_go_with_what_calls_them(library: BuiltLibrary) -> None:
    opened = OpenProgram(Program(2, [library], [Call(0, [0, 1], [2, 3])], [2]))
    number, inputs = opened._number, [torch.randn(3, 4), torch.zeros(3, 4)]
    made = opened(inputs)
    del opened
    gc.collect()
    with pytest.raises(RuntimeError, match="there is no program"):
        torch.ops.k31.run_program(number, inputs)
    assert torch.equal(made[0], 2 * inputs[0])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [2, 3, 6, 12])
def test_numbers_that_are_no_program_are_refused(library: BuiltLibrary, wrong: int) -> None:
    numbers, shapes = Program(2, [library], [Call(0, [0, 1], [2, 3])], [2]).told()
    paths = [str(library.path)]
    torch.ops.k31.close_program(torch.ops.k31.open_program(paths, numbers, shapes))
    with pytest.raises(RuntimeError):
        torch.ops.k31.open_program(paths, [*numbers[:wrong], 77, *numbers[wrong + 1 :]], shapes)
    with pytest.raises(RuntimeError):
        torch.ops.k31.open_program(paths, [*numbers[:wrong], -2, *numbers[wrong + 1 :]], shapes)
    with pytest.raises(RuntimeError):
        torch.ops.k31.open_program(paths, numbers[:-1], shapes)
    with pytest.raises(RuntimeError):
        torch.ops.k31.open_program(paths, [*numbers, 0], shapes)


def test_values_are_let_go_at_their_last_reading() -> None:
    shape = Shape((2,), (1,), torch.float32)
    library = BuiltLibrary(Path("none"), (shape,), (), (shape, shape))
    steps = [Call(0, [0], [1, 2]), Call(0, [1], [3, 4]), View(3, 5, shape, 0)]
    program = Program(1, [library], steps, [5, 1])
    assert program._last_readings() == [[0, 2], [4], [3]]
