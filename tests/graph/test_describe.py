"""Two regions, or two readings, share a key only where the same runs would be judged in the same way."""

import dataclasses
import itertools
import math
import operator
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from k31compile.graph import memory, surroundings
from k31compile.graph.dataflow import Dataflow
from k31compile.graph.describe import Describer
from k31compile.graph.layout import Layout
from k31compile.graph.memory import place_of
from k31compile.graph.region import Region
from k31compile.passes.recognise.norm_reading import NormOperands, NormReading

ATEN = torch.ops.aten
MASK = torch.tensor([True, False, True, True, False, False])


def like(shape=(2, 6), dtype=torch.float32, stride=None, device="meta"):
    return torch.empty(shape, dtype=dtype, device=device) if stride is None else torch.empty_strided(
        shape, stride, dtype=dtype, device=device
    )  # fmt: skip


@dataclass
class Program:
    """A small graph, an ingredient of its region an attribute each."""

    x: Any = field(default_factory=like)
    y: Any = field(default_factory=like)
    inner: Any = field(default_factory=like)
    lender: Any = field(default_factory=like)
    mask: torch.Tensor = field(default_factory=lambda: MASK)
    product: Any = ATEN.mul.Tensor
    factor: Any = 0.5
    joined: Any = ATEN.add.Tensor
    turned: bool = False
    alpha: dict = field(default_factory=dict)
    dims: Any = (1,)
    keep: Any = False
    dtype: Any = torch.float32
    fill: Any = -1.0
    size: Any = 6
    outputs: tuple = ("filled", "summed")
    leaves: tuple = ("x", "y")
    names: str = ""
    late: bool = False
    trace: str = "model.py"

    def region(self) -> Region:
        graph = fx.Graph()
        module = torch.nn.Module()
        module.mask = self.mask
        nodes = {}

        def put(name, node, value):
            node.meta.update(val=value, stack_trace=self.trace)
            nodes[name] = node
            return node

        def call(name, target, *args, value=None, **kwargs):
            made = graph.create_node("call_function", target, args, kwargs, name=self.names + name)
            return put(name, made, self.inner if value is None else value)

        for name in ("lender", "x", "y"):
            put(name, graph.placeholder(self.names + name), getattr(self, name))
        x, y = nodes["x"], nodes["y"]
        if not self.late:
            constant = put("mask", graph.get_attr("mask"), self.mask)
        a = call("a", self.product, x, self.factor)
        b = call("b", self.joined, *((y, a) if self.turned else (a, y)), **self.alpha)
        if self.late:
            constant = put("mask", graph.get_attr("mask"), self.mask)
        empty = call("empty", ATEN.new_zeros.default, nodes["lender"], [2, self.size])
        first = call("filled", ATEN.masked_fill.Scalar, b, constant, self.fill)
        call("summed", ATEN.sum.dim_IntList, call("c", ATEN.add.Tensor, b, empty), list(self.dims), self.keep,
             dtype=self.dtype)  # fmt: skip
        graph.output((first, nodes["summed"]))
        owner = fx.GraphModule(module, graph)
        owner.graph.owning_module = owner
        found = {node.name: node for node in owner.graph.nodes}
        renamed = {name: found[node.name] for name, node in nodes.items()}
        return Region.between(
            Dataflow(owner.graph), [renamed[n] for n in self.leaves], [renamed[n] for n in self.outputs]
        )


def key(program):
    return Describer(program.region()).region


def symbolic(*shapes, dtype=torch.float32):
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    return [mode.from_tensor(torch.empty(shape, dtype=dtype), static_shapes=False) for shape in shapes]


def with_symbols(*shapes, **changes):
    x, y = symbolic(*shapes)
    return Program(x=x, y=y, inner=y, **changes)


def doubled(shape, how):
    (x,) = symbolic(shape)
    return Program(x=x, y=x, inner=x, size=how(x.shape))


def foreign_operator(name):
    library = torch.library.Library("k31_test_foreign", "FRAGMENT")
    library.define(f"{name}(Tensor x, float f) -> Tensor")
    return getattr(torch.ops.k31_test_foreign, name).default


OTHERS = {
    "an operator": Program(joined=ATEN.sub.Tensor),
    "an overload": Program(product=ATEN.mul.Scalar),
    "an operator of the interpreter": Program(product=operator.mul),
    "another operator of the interpreter": Program(product=operator.truediv),
    "a function of math": Program(product=math.pow),
    "a number": Program(factor=0.25),
    "a number by one bit": Program(factor=math.nextafter(0.5, 1)),
    "an integer for a float": Program(factor=1),
    "a float for an integer": Program(factor=1.0),
    "a truth for an integer": Program(factor=True),
    "a zero with a sign": Program(factor=-0.0),
    "a zero": Program(factor=0.0),
    "no number": Program(factor=None),
    "a word": Program(factor="0.5"),
    "infinity": Program(fill=-math.inf),
    "not a number": Program(fill=math.nan),
    "which operand is first": Program(turned=True),
    "an argument by name": Program(alpha={"alpha": 2}),
    "a dimension": Program(dims=(0,)),
    "two dimensions": Program(dims=(0, 1)),
    "a flag": Program(keep=True),
    "a type": Program(dtype=torch.float64),
    "no type": Program(dtype=None),
    "a size": Program(size=5),
    "a constant's value": Program(mask=~MASK),
    "a constant's shape": Program(mask=MASK.reshape(1, 6)),
    "a constant's type": Program(mask=MASK.to(torch.uint8)),
    "a leaf's type": Program(x=like(dtype=torch.bfloat16)),
    "a leaf's shape": Program(x=like((1, 6))),
    "a leaf's strides": Program(x=like(stride=(1, 2))),
    "a leaf's device": Program(x=like(device="cpu")),
    "the other leaf's strides": Program(y=like(stride=(12, 1))),
    "where a leaf begins": Program(x=torch.empty(20, device="meta")[4:16].view(2, 6)),
    "the shape that is lent": Program(lender=like((3, 6))),
    "the type that is lent": Program(lender=like(dtype=torch.float16)),
    "an inner value's type": Program(inner=like(dtype=torch.float64)),
    "an inner value's strides": Program(inner=like(stride=(1, 2))),
    "the outputs": Program(outputs=("filled",)),
    "the order of the outputs": Program(outputs=("summed", "filled")),
    "another output": Program(outputs=("filled", "c")),
    "the leaves": Program(leaves=("b",)),
    "symbols": with_symbols((5, 6), (5, 6)),
    "symbols that differ": with_symbols((5, 6), (7, 6)),
    "symbols the other way round": with_symbols((5, 6), (6, 5)),
    "symbols that are one": with_symbols((5, 5), (5, 5)),
    "what a symbol was": with_symbols((9, 6), (9, 6)),
    "twice a symbol": doubled((5, 6), lambda shape: shape[0] * 2),
    "a symbol and two": doubled((5, 6), lambda shape: shape[0] + 2),
    "twice the other symbol": doubled((5, 6), lambda shape: shape[1] * 2),
    "half of a symbol": doubled((5, 6), lambda shape: shape[0] // 2),
    "a symbol modulo two": doubled((5, 6), lambda shape: shape[0] % 2),
    "a quotient of symbols": doubled((5, 6), lambda shape: shape[0] / shape[1]),
    "a comparison of symbols": doubled((5, 6), lambda shape: shape[0] < shape[1]),
    "the greater of two symbols": doubled((5, 6), lambda shape: torch.sym_max(shape[0], shape[1])),
    "a slice": Program(factor=slice(None, 3, None)),
    "another slice": Program(factor=slice(None, None, 3)),
    "a mapping": Program(alpha={"options": {"a": 1}}),
    "another mapping": Program(alpha={"options": {"a": 2}}),
    "a device in an argument": Program(alpha={"device": torch.device("cpu")}),
    "another device in an argument": Program(alpha={"device": torch.device("meta")}),
    "a stranger's operator": Program(product=foreign_operator("one")),
    "another stranger's operator": Program(product=foreign_operator("two")),
    "a function of nobody": Program(product=lambda x, f: x * f),
    "another function of nobody": Program(product=lambda x, f: x + f),
}
NOT_PORTABLE = {name for name in OTHERS if "stranger" in name or "nobody" in name}


def test_no_two_regions_share_a_key():
    keys = {"as it is": key(Program()), **{name: key(program) for name, program in OTHERS.items()}}
    for (one, first), (other, second) in itertools.combinations(keys.items(), 2):
        assert first.digest != second.digest, f"{one} and {other}"
    assert {name for name, one in keys.items() if not one.is_portable} == NOT_PORTABLE


SAME = {
    "made again": Program(),
    "names": Program(names="renamed_"),
    "the order of independent nodes": Program(late=True),
    "lines and paths": Program(trace="elsewhere/other.py, line 700"),
    "a tuple for a list": Program(dims=[1]),
    "the values of the caller": Program(x=like()),
    "a constant elsewhere in memory": Program(mask=MASK.clone()),
}


@pytest.mark.parametrize("name", SAME)
def test_what_decides_nothing_is_not_in_a_key(name):
    assert key(SAME[name]).digest == key(Program()).digest


def test_the_names_of_symbols_are_not_in_a_key():
    first = with_symbols((5, 6), (5, 6))
    _, x, y = symbolic((8, 9), (5, 6), (5, 6))
    assert str(x.shape[0]) != str(first.x.shape[0])
    assert key(Program(x=x, y=y, inner=y)).digest == key(first).digest


def test_what_stands_for_itself_is_held(monkeypatch):
    """An address may be used again; what a key names by its address must live as long as the key."""
    program = Program(product=lambda x, f: x * f)
    assert any(thing is program.product for thing in key(program).held)


def operands_of(region):
    x, gate = region.leaves
    return NormOperands(x, gate, x, 6, 1e-6, "silu", True)


def reading(**changes):
    region = Program(leaves=("x", "y", "mask"), outputs=("filled",)).region()
    x, y = region.leaves[0], region.leaves[1]
    roles = {"x": x, "gate": y, "weight": region.leaves[2]}
    given = {"width": 6, "eps": 1e-6, "activation": "sigmoid", "norm_before_gate": True}
    names = {role: roles[changes.pop(role)] for role in list(changes) if role in roles}
    made = NormReading(region, NormOperands(**{**roles, **names, **given, **changes}))
    return Describer(region).reading(made, made.decides_nothing)


class Stranger(NormReading):
    """A reading that is none of ours."""


READINGS = {
    "which leaf is which": {"x": "gate", "gate": "x"},
    "a leaf in two roles": {"gate": "x"},
    "a width": {"width": 3},
    "an eps": {"eps": 1e-5},
    "an activation": {"activation": "silu"},
    "an order": {"norm_before_gate": False},
}


def test_no_two_readings_share_a_key():
    found = {"as it is": reading(), **{name: reading(**dict(changes)) for name, changes in READINGS.items()}}
    for (one, first), (other, second) in itertools.combinations(found.items(), 2):
        assert first.digest != second.digest, f"{one} and {other}"
    assert all(one.is_portable for one in found.values())


def test_every_field_of_a_reading_is_in_its_key():
    named = {one.name for one in dataclasses.fields(NormOperands)}
    assert named == {"x", "gate", "weight", "width", "eps", "activation", "norm_before_gate"}
    region = Program().region()
    made = NormReading(region, operands_of(region))
    before = Describer(region).reading(made, made.decides_nothing)
    made.something_more = Layout("ab", (0, 1))
    after = Describer(region).reading(made, made.decides_nothing)
    assert before.digest != after.digest
    made.something_more = Layout("ab", (1, 0))
    assert Describer(region).reading(made, made.decides_nothing).digest not in (before.digest, after.digest)


def test_a_class_that_is_not_ours_stands_for_itself():
    region = Program().region()
    ours, theirs = (kind(region, operands_of(region)) for kind in (NormReading, Stranger))
    assert Describer(region).reading(ours).is_portable
    assert not Describer(region).reading(theirs).is_portable


def place():
    region = Program().region()
    described = Describer(region)
    return place_of(described.region, described.reading(NormReading(region, operands_of(region))))


def autocast(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)


AROUND = {
    "our sources": lambda m: m.setattr(surroundings, "digest_of_sources", lambda *folders: "other"),
    "which sources": lambda m: m.setattr(memory, "_SOURCES", ("graph",)),
    "torch": lambda m: m.setattr(torch, "__version__", "2.13.1"),
    "python": lambda m: m.setattr(sys, "version_info", (3, 99)),
    "machine": lambda m: m.setattr(surroundings.platform, "machine", lambda: "other"),
    "instructions": lambda m: m.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER"),
    "autocast": autocast,
    "precision": lambda m: m.setattr(torch, "get_float32_matmul_precision", lambda: "medium"),
    "deterministic": lambda m: m.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True),
    "default type": lambda m: m.setattr(torch, "get_default_dtype", lambda: torch.float64),
    "torch as built": lambda m: m.setattr(torch.version, "git_version", "other"),
    "oneDNN": lambda m: m.setattr(torch.backends.mkldnn, "enabled", False),
    "format": lambda m: m.setattr(memory, "_FORMAT", 99),
}


def test_what_a_confirmation_rests_on_is_in_its_key(monkeypatch):
    keys = {"as it is": place().region}
    for name, change in AROUND.items():
        with monkeypatch.context() as one:
            change(one)
            keys[name] = place().region
    assert len(set(keys.values())) == len(keys)
    assert place().region == keys["as it is"]


def test_every_source_that_confirms_is_in_the_digest(tmp_path, monkeypatch):
    def digest():
        surroundings.digest_of_sources.cache_clear()
        return surroundings.digest_of_sources("graph", "kernels")

    monkeypatch.setattr(surroundings, "_PACKAGE", tmp_path)
    (tmp_path / "graph").mkdir()
    (tmp_path / "kernels" / "cpu").mkdir(parents=True)
    seen = [digest()]
    for name, text in (("graph/a.py", "1"), ("graph/a.py", "2"), ("graph/b.py", "2"), ("kernels/cpu/a.cpp", "2")):
        (tmp_path / name).write_text(text)
        seen.append(digest())
    (tmp_path / "graph/b.py").rename(tmp_path / "graph/c.py")
    seen.append(digest())
    assert len(set(seen)) == len(seen)
    (tmp_path / "graph/notes.txt").write_text("no source")
    assert digest() == seen[-1]
    surroundings.digest_of_sources.cache_clear()


def test_a_key_is_the_same_in_every_process():
    """Whatever the seed of hashes, the folder, and what was made before."""
    here = Path(__file__).parent
    code = f"import sys; sys.path.insert(0, {str(here)!r}); import test_describe as t; p = t.place(); "
    code += "print(p.region, p.reading, p.is_portable)"
    said = {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={
                "PYTHONPATH": str(here.parents[1]),
                "PYTHONHASHSEED": str(seed),
                "PATH": "/usr/bin",
                "HOME": str(here),
            },
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, folder in ((0, "/"), (7, here))
    }
    mine = place()
    assert said == {f"{mine.region} {mine.reading} True\n"}
