"""The key holds every ingredient of a compile and nothing else: each is changed by itself, in both directions."""

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from key_cases import differing, draw, key_of
from torch import Tensor, fx, nn

from k31compile.cache import surroundings
from k31compile.cache.key import Key, make_key
from k31compile.errors import KeyingError
from k31compile.keeping import _digest
from k31compile.options import Options

SCALE = 2.0


def helper(x: Tensor) -> Tensor:
    return x * SCALE


def program(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (helper(x) @ weight).softmax(-1) + y


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return draw(3, 4), draw(3, 5), draw(4, 5)


BASE = key_of(program, *inputs())


def test_an_equal_compile_has_an_equal_key() -> None:
    assert key_of(program, *inputs()).digest == BASE.digest
    assert len(BASE.digest) == 64


def other_operator(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (helper(x) @ weight).softmax(-1) - y


def other_argument(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (helper(x) @ weight).softmax(0) + y


def other_order(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return y + (helper(x) @ weight).softmax(-1)


def other_kind_of_number(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (x * 2 @ weight).softmax(-1) + y


def other_output(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    made = (helper(x) @ weight).softmax(-1)
    return made + y, made


CODE = [other_operator, other_argument, other_order, other_kind_of_number, other_output]


@pytest.mark.parametrize("changed", CODE, ids=lambda changed: changed.__name__)
def test_other_code_of_the_model(changed: Callable[..., Any]) -> None:
    assert differing(BASE, key_of(changed, *inputs())) == {"graph"}


def test_a_global_that_a_helper_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert differing(BASE, key_of(program, *inputs())) == {"graph"}


def test_what_a_closure_holds() -> None:
    def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * factor

    assert differing(key_of(scaled_by(2.0), draw(3)), key_of(scaled_by(3.0), draw(3))) == {"graph"}


def test_a_constant_tensor() -> None:
    def shifted_by(values: list[float]) -> Callable[[Tensor], Tensor]:
        return lambda x: x + torch.tensor(values)

    assert differing(key_of(shifted_by([1.0, 2.0]), draw(2)), key_of(shifted_by([1.0, 3.0]), draw(2))) == {"graph"}


def strided(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


SHARED = draw(3, 5)
INPUTS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "a shape": lambda: (draw(6, 4), draw(6, 5), draw(4, 5)),
    "a dtype": lambda: tuple(tensor.double() for tensor in inputs()),
    "a stride": lambda: (strided(draw(3, 4)), draw(3, 5), draw(4, 5)),
    "a parameter": lambda: (draw(3, 4), draw(3, 5), nn.Parameter(draw(4, 5))),
    "one that wants gradients": lambda: (draw(3, 4), draw(3, 5).requires_grad_(), draw(4, 5)),
    "two in one memory": lambda: (SHARED[:, :4], SHARED, draw(4, 5)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_what_the_inputs_are(name: str) -> None:
    assert "inputs" in differing(BASE, key_of(program, *INPUTS[name]()))


def test_two_inputs_in_one_memory_are_not_two_with_the_same_strides() -> None:
    wide = draw(3, 5)
    together = key_of(program, wide[:, :4], wide, draw(4, 5))
    apart = key_of(program, draw(3, 5)[:, :4], draw(3, 5), draw(4, 5))
    assert differing(together, apart) == {"inputs"}


def lengths(x: Tensor) -> Tensor:
    return x.sum(0) * x.shape[0]


def test_a_dynamic_size_is_not_its_number_and_has_its_own_name() -> None:
    at_five, at_nine = (key_of(lengths, draw(n, 4), dynamic=True) for n in (5, 9))
    assert at_five.digest == at_nine.digest
    assert at_five.with_hints().digest != at_nine.with_hints().digest
    assert "inputs" in differing(at_five, key_of(lengths, draw(5, 4)))


OPTIONS: dict[str, Any] = {
    "fuse": ["lightning_indexer"],
    "strict": True,
    "layout": "nz",
    "super_kernel": False,
    "confirm_bytes": 1 << 20,
    "node_budget": 500,
    "choice": "measured",
}
NEUTRAL: dict[str, Any] = {"cache": "/nowhere", "codegen": "tiered", "require_warm": True, "lock": "/no/such/contract"}
NOT_FOR_A_CPU = {"target": "says which device and is an ingredient of its own", "streams": "refused on a CPU"}
ONE_VALUE = {"quant", "guards"}


def test_every_option_is_known_here() -> None:
    names = {field.name for field in dataclasses.fields(Options)}
    assert names == {*OPTIONS, *NEUTRAL, *NOT_FOR_A_CPU, *ONE_VALUE}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_decides(name: str) -> None:
    assert differing(BASE, key_of(program, *inputs(), **{name: OPTIONS[name]})) == {"options"}


@pytest.mark.parametrize("name", NEUTRAL)
def test_an_option_that_decides_nothing(name: str) -> None:
    assert not differing(BASE, key_of(program, *inputs(), **{name: NEUTRAL[name]}))


def key_under(mode: Callable[[], Any]) -> Key:
    found: list[Key] = []

    def backend(module: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        found.append(make_key(module, given, Options(), "cpu", _digest))
        return module.forward

    torch._dynamo.reset()
    with mode():
        torch.compile(program, backend=backend)(*inputs())
    return found[0]


def test_the_grad_mode() -> None:
    assert "mode" in differing(BASE, key_under(torch.enable_grad))
    assert "inputs" in differing(BASE, key_under(torch.inference_mode))


def test_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = key_of(program, *inputs())
    with torch.autocast("cpu", dtype=torch.float16):
        other = key_of(program, *inputs())
    assert "mode" in differing(BASE, low)
    assert "mode" in differing(low, other)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_how_torch_is_set(name: str) -> None:
    get, put, value = SETTINGS[name]
    before = get()
    put(value)
    try:
        assert "mode" in differing(BASE, key_of(program, *inputs()))
    finally:
        put(before)


def test_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert "threads" in differing(BASE, key_of(program, *inputs()))
    finally:
        torch.set_num_threads(before)


def test_how_inductor_is_configured() -> None:
    from torch._inductor import config

    with config.patch(epilogue_fusion=False):
        assert differing(BASE, key_of(program, *inputs())) == {"inductor"}
    with config.patch(verbose_progress=True):
        assert not differing(BASE, key_of(program, *inputs()))
    with config.patch(post_grad_custom_post_pass=lambda graph: None):  # noqa: SIM117
        with pytest.raises(Exception, match="without a uuid"):
            key_of(program, *inputs())


VERSIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "torch": lambda patch: patch.setattr(torch, "__version__", "2.13.1"),
    "python": lambda patch: patch.setattr(surroundings, "_python_version", lambda: "CPython 3.12"),
    "machine": lambda patch: patch.setattr(surroundings, "machine_digest", lambda: "another"),
    "sources": lambda patch: patch.setattr(surroundings, "source_digest", lambda: "another"),
    "kernels": lambda patch: patch.setattr(surroundings, "available", lambda: (False, "switched off")),
    "npu": lambda patch: patch.setattr(surroundings, "_npu_version", lambda target: "2.13.0"),
}


def test_the_instructions_that_kernels_are_held_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "available", lambda: (True, "built"))
    own = key_of(program, *inputs())
    monkeypatch.setattr(surroundings.cpu_isa, "chosen", lambda: "portable")
    assert differing(own, key_of(program, *inputs())) == {"kernels"}


@pytest.mark.parametrize("name", VERSIONS)
def test_versions_sources_and_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    VERSIONS[name](monkeypatch)
    monkeypatch.setattr(torch, "__version__", torch.__version__)
    assert name in differing(BASE, key_of(program, *inputs()))


def test_every_ingredient_was_changed_here() -> None:
    seen = {"graph", "inputs", "options", "mode", "threads", "inductor", *VERSIONS}
    assert set(BASE.ingredients) == seen


def test_a_source_file_of_ours_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("passes/one.py", "kernels/two.cpp", "cli/three.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(surroundings, "_ROOT", tmp_path)
    digest = surroundings.source_digest.__wrapped__
    before = digest()
    (tmp_path / "cli/three.py").write_text("2")
    assert digest() == before
    for name in ("passes/one.py", "kernels/two.cpp"):
        (tmp_path / name).write_text("2")
        assert digest() != before
        before = digest()


@torch.library.custom_op("k31test::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * SCALE


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def calls_an_operator(x: Tensor) -> Tensor:
    return scaled(x) + 1


def test_the_body_of_an_operator_of_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(calls_an_operator, draw(3))
    assert before.digest == key_of(calls_an_operator, draw(3)).digest
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert differing(before, key_of(calls_an_operator, draw(3))) == {"graph"}


@torch._dynamo.allow_in_graph
def opaque(x: Tensor) -> Tensor:
    return x * SCALE


class _Counter:
    value = 1.0


@torch._dynamo.allow_in_graph
def unseen(x: Tensor) -> Tensor:
    return x * _Counter.value


def test_a_function_that_stays_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(lambda x: opaque(x) + 1, draw(3))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert differing(before, key_of(lambda x: opaque(x) + 1, draw(3))) == {"graph"}


def test_a_function_that_cannot_be_seen_through_has_no_key() -> None:
    with pytest.raises(Exception, match="stays a call in the graph") as raised:
        key_of(lambda x: unseen(x) + 1, draw(3))
    assert KeyingError.__name__ in str(raised.value)


SCRIPT = """
    import sys, torch
    from k31compile.cache.key import make_key
    from k31compile.keeping import _digest
    from k31compile.options import Options
    from models.{module} import Block

    def backend(module, inputs):
        print(make_key(module, inputs, Options(), "cpu", _digest).digest)
        return module.forward

    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.no_grad():
        torch.compile(Block(), backend=backend, fullgraph=True)(torch.ones(2, 6, 8), torch.zeros(2, 16, 8))
"""

MODEL = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    {comment}
    NAMES = {{"alpha", "beta", "gamma"}}

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({{name: nn.Linear(8, 8) for name in sorted(NAMES)}})
            self.names = NAMES
        {comment}
        def forward(self, x, cache):
            cache[:, : x.shape[1]] = x
            found = sum(self.parts[name](x) for name in sorted(self.names))
            return F.silu(found).mean(1) + cache.amax(1)
"""


def run_elsewhere(folder: Path, comment: str = "", module: str = "block", **environment: str) -> str:
    (folder / "models").mkdir(parents=True, exist_ok=True)
    (folder / "models" / "__init__.py").write_text("")
    (folder / "models" / f"{module}.py").write_text(textwrap.dedent(MODEL).replace("{comment}", comment).format())
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT).format(module=module))
    own = {key: value for key, value in os.environ.items() if key not in ("HOME", "PYTHONHASHSEED")}
    own |= {"HOME": str(folder), "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])} | environment
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=own, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_paths_users_seeds_comments_and_ranks_change_nothing(tmp_path: Path) -> None:
    first = run_elsewhere(tmp_path / "a", PYTHONHASHSEED="0", USER="anna")
    assert len(first) == 64
    elsewhere = tmp_path / "b" / "another place"
    others = {
        "seed, user, path, rank, port": run_elsewhere(
            elsewhere, PYTHONHASHSEED="7", USER="ben", RANK="3", LOCAL_RANK="3", MASTER_PORT="29501", LOGNAME="ben"
        ),
        "comments and lines": run_elsewhere(tmp_path / "c", "# a comment\n    # of two lines", PYTHONHASHSEED="3"),
        "name of the file": run_elsewhere(tmp_path / "d", module="other", PYTHONHASHSEED="9"),
    }
    assert {name for name, key in others.items() if key != first} == set()
