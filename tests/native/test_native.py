"""A graph as one library gives what eager gives, whatever its inputs and outputs are."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from k31compile.errors import NativeError
from k31compile.graph.trace import trace_functional
from k31compile.kernels.cpu import loader
from k31compile.kernels.cpu.direct_calls import count_calls
from k31compile.targets.native.build import EXTERNS, LIBRARY, build_native
from k31compile.targets.native.load import load_native


def compiled(program: Callable[..., Any], folder: Path, dynamic: bool | None = False) -> Callable[..., Any]:
    """The program with every graph of it built to a library of its own, loaded at once."""
    count = 0

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal count
        count += 1
        own = folder / str(count)
        own.mkdir()
        plan = build_native(trace_functional(module, inputs), inputs, own)
        return load_native(own, plan)

    torch._dynamo.reset()
    return torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)


def views(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    cache[:, 1:3] += x
    return cache[0], x * 2, cache, x.t(), cache[:, 1:3].reshape(-1), x.reshape(-1)


def copies_before_a_write(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    before = cache[:, 1:3].contiguous()
    row = cache[:, :2].reshape(-1)
    cache.zero_()
    return before, row, x + 1


def twice(x: Tensor, cache: Tensor) -> tuple[Any, ...]:
    made = x.sin()
    return made, None, made, made[0], 3, made.view(-1)


def only_writes(x: Tensor, cache: Tensor) -> None:
    cache[:, 1:3].copy_(x.cos())


def many_types(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    whole = (x * 10).to(torch.int64)
    return whole % 3, x > 0, x.double().exp(), x.to(torch.bfloat16) * 3, torch.complex(x, x), x.sum(), x[:0] * 2


PROGRAMS = [views, copies_before_a_write, twice, only_writes, many_types]


def arguments(rows: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 2, generator=generator), torch.randn(rows, 4, generator=generator)


def assert_same(expected: Any, got: Any) -> None:
    if isinstance(expected, Tensor):
        near = 1e-2 if expected.dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(got, expected, rtol=near, atol=near)
        assert got.stride() == expected.stride()
    elif isinstance(expected, tuple | list):
        assert len(expected) == len(got)
        for left, right in zip(expected, got, strict=True):
            assert_same(left, right)
    else:
        assert expected == got


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_values_and_writes_are_those_of_eager(program: Callable[..., Any], tmp_path: Path) -> None:
    with torch.no_grad():
        run = compiled(program, tmp_path)
        for _ in range(2):
            x, cache = arguments()
            also = x.clone(), cache.clone()
            assert_same(program(x, cache), run(*also))
            assert_same((x, cache), also)


def test_what_shared_memory_with_an_input_does_so(tmp_path: Path) -> None:
    x, cache = arguments()
    with torch.no_grad():
        row, fresh, same, turned, *_ = compiled(views, tmp_path)(x, cache)
    assert same is cache
    assert row.data_ptr() == cache.data_ptr()
    assert turned.data_ptr() == x.data_ptr()
    cache.fill_(7)
    assert bool((row == 7).all())
    assert fresh.data_ptr() not in (x.data_ptr(), cache.data_ptr())


def scaled(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    cache[: x.shape[0]] += x.sum(1, keepdim=True)
    return (x.softmax(-1) * x.shape[0]).sum(0), cache[: x.shape[0]]


def test_a_dynamic_size_is_read_from_a_tensor(tmp_path: Path) -> None:
    with torch.no_grad():
        run = compiled(scaled, tmp_path, dynamic=True)
        for rows in (3, 5, 2, 64):
            x, _ = arguments(rows)
            cache = torch.zeros(64, 4)
            also = x.clone(), cache.clone()
            assert_same(scaled(x, cache), run(*also))
            assert_same(cache, also[1])
    assert len(list(tmp_path.iterdir())) == 1


def test_a_size_that_no_tensor_has_is_refused(tmp_path: Path) -> None:
    def program(x: Tensor, n: int) -> Tensor:
        return x * n

    x = torch.ones(4)
    with torch.no_grad(), pytest.raises(Exception, match="is an input and no tensor has it") as raised:
        compiled(program, tmp_path, dynamic=True)(x, 7)
    assert "NativeError" in str(raised.value)


def test_autocast_casts_once(tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(3, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)
        got = compiled(lambda x: layer(x), tmp_path)(x)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, expected)


def test_two_threads_call_one_library(tmp_path: Path) -> None:
    def program(x: Tensor) -> Tensor:
        return (x.sin() @ x.cos().t()).sum(1)

    with torch.no_grad():
        run = compiled(program, tmp_path)
        run(torch.ones(4, 4))
        wrong: list[int] = []

        def work(seed: int) -> None:
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                wrong.extend(seed for _ in range(200) if not torch.allclose(run(x), program(x), atol=1e-5))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_nothing_of_a_weight_is_in_the_library(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with torch.no_grad():
        run = compiled(lambda x: layer(x), tmp_path)
        run(x)
        layer.bias.fill_(100.0)
        layer.weight.zero_()
        assert_same(layer(x), run(x))


def test_a_file_that_is_no_library_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"not a library")
    (tmp_path / EXTERNS).write_bytes(b'{"nodes": []}')
    with pytest.raises(NativeError, match="does not load"):
        load_native(tmp_path, {"tensors": [0], "outputs": [{"library": 0}]})


def test_operators_in_a_library_are_called_without_python(tmp_path: Path) -> None:
    usable, why = loader.available()
    if not usable or count_calls("gated_rms_norm") is None:
        pytest.skip(why)

    def program(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.k31.gated_rms_norm(x + 1, gate, weight, eps=1e-5) * 2

    tensors = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8)
    run = compiled(program, tmp_path)
    with torch.no_grad():
        run(*tensors)
        before = count_calls("gated_rms_norm")
        made = run(*tensors)
        counted = count_calls("gated_rms_norm")
    assert before is not None
    assert counted == (before[0] + 1, before[1])
    torch.testing.assert_close(made, program(*tensors))
