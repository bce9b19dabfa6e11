"""Which instructions the kernels are built with: K31_CPU_ISA, what it refuses, and the whole package under it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k31compile import cpu_isa
from k31compile.errors import BuildError, OptionError
from k31compile.kernels.cpu import build, compile_units, loader
from k31compile.store import cache_dir

TESTS = Path(__file__).parent
ROOT = TESTS.parents[1]
V3 = "flags : sse2 avx avx2 bmi1 bmi2 f16c fma abm movbe"
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
needs_avx2 = pytest.mark.skipif(bool(cpu_isa.lacks("avx2")), reason="this processor cannot run x86-64-v3")
needs_objdump = pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump: Debian's package binutils")


@pytest.fixture
def choose(monkeypatch):
    """Set the variable, and which instructions the machine has; what was read before is forgotten."""

    def run(value, instructions=V3):
        monkeypatch.setenv(cpu_isa.VARIABLE, value)
        for module in (cpu_isa, build):
            monkeypatch.setattr(module, "instruction_set", lambda: instructions)
        cpu_isa.chosen.cache_clear()

    yield run
    monkeypatch.undo()
    cpu_isa.chosen.cache_clear()


def test_what_is_not_known_is_refused_with_what_is(choose):
    choose("avx512")
    with pytest.raises(OptionError, match=r"K31_CPU_ISA does not take 'avx512'.*native, avx2, portable"):
        build.build_key("fast")
    with pytest.raises(OptionError, match="does not take"):
        loader._load("fast")


def test_what_the_machine_lacks_is_refused(choose):
    choose("avx2", V3.replace(" fma", ""))
    with pytest.raises(OptionError, match=r"K31_CPU_ISA=avx2, but this processor does not have fma.*portable"):
        build.build_key("fast")
    with pytest.raises(BuildError, match="this machine lacks fma"):
        build.built_library("avx2")
    choose("portable", "Features : fp asimd")
    assert build.flags("fast") == ("-DK31_LANES=4",)


def test_unset_and_empty_are_this_machine(choose):
    choose("")
    assert cpu_isa.chosen() == "native"
    assert build.flags("fast")[0] == "-march=native"


def test_each_has_its_own_key_and_says_so(choose):
    keys, told = set(), []
    for name in cpu_isa.FLAGS:
        choose(name)
        keys.add(build.build_key("fast"))
        told.append(loader._built_for("fast"))
    assert len(keys) == len(cpu_isa.FLAGS)
    assert told == [
        "C++ kernels built for this machine",
        "C++ kernels built with K31_CPU_ISA=avx2",
        "C++ kernels built with K31_CPU_ISA=portable",
    ]


def test_a_library_of_a_newer_processor_is_not_taken_from_its_cache(choose, tmp_path, monkeypatch):
    monkeypatch.setenv("K31_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "compiler", lambda: ["g++"])
    built = []

    def make(_command, _variant, path):
        built.append(path)
        path.write_bytes(b"library")
        path.with_name(path.name).chmod(0o600)

    monkeypatch.setattr(build, "_build", make)
    monkeypatch.setattr(build, "_fault", lambda *_: None)  # each of them is as sound as can be
    choose("native", f"{V3} avx512f")
    newer = build.built_library()
    assert build.built_library() == newer
    choose("native", V3)
    older = build.built_library()
    assert older != newer
    assert built == [newer, older]
    assert sorted(cache_dir().glob("kernels/*.so")) == sorted(built)


def evex_instructions(path):
    """Instructions of an object file with the prefix that AVX-512 alone has; without one 0x62 is no instruction."""
    listing = subprocess.run(["objdump", "-d", "-w", str(path)], capture_output=True, text=True, check=True).stdout
    codes = re.findall(r"^ *[0-9a-f]+:\t([0-9a-f]{2})", listing, re.MULTILINE)
    assert codes
    return codes.count("62")


CHILD = """
import json, torch, k31compile
from k31compile.kernels import registry
from k31compile.kernels.cpu import build
from k31compile.cache.surroundings import describe_surroundings

def gated(x, gate, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight * torch.sigmoid(gate)

torch.manual_seed(0)
given = torch.randn(2, 5, 37), torch.randn(2, 5, 37), torch.randn(37)
compiled = torch.compile(gated, backend="k31", options={"strict": True, "cache": False})
with torch.no_grad():
    found, wanted = compiled(*given), gated(*(tensor.double() for tensor in given))
report = k31compile.last_report().to_dict()
print(json.dumps({
    "error": (found - wanted).abs().max().item(),
    "report": report,
    "library": str(build.built_library()),
    "kernels": describe_surroundings("cpu")["kernels"],
}))
"""


@pytest.fixture(scope="module")
def forced(tmp_path_factory):
    """The environment of a process that is held to AVX2, with a cache of its own, and what the package gave there."""
    folder = tmp_path_factory.mktemp("forced")
    environment = os.environ | {cpu_isa.VARIABLE: "avx2", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"K31_CACHE_DIR": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD], env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return environment, json.loads(done.stdout.splitlines()[-1])


@needs_compiler
@needs_avx2
@pytest.mark.slow
class TestHeldToAvx2:
    def test_a_graph_is_compiled_and_right_and_the_report_says_so(self, forced):
        _, told = forced
        assert told["error"] < 1e-5
        assert told["kernels"] == "avx2"
        provider = told["report"]["providers"]["gated_rms_norm"]
        assert provider["provider"] == "cpu-fast"
        assert provider["why"] == "cpu-fast: C++ kernels built with K31_CPU_ISA=avx2"

    def test_the_kernels_are_right(self, forced):
        environment = forced[0] | {"K31_TEST_IMPLEMENTATIONS": "cpu-fast", "K31_REQUIRE_WARM": "1"}
        line = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "test_odd_sizes", TESTS]
        done = subprocess.run(
            [*map(str, line)], env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500
        )
        assert done.returncode == 0, done.stdout[-4000:]
        assert re.search(r"^[1-9]\d\d passed, \d+ deselected in ", done.stdout, re.MULTILINE), done.stdout[-500:]

    @needs_objdump
    def test_no_instruction_of_avx_512_is_in_the_library(self, forced):
        assert evex_instructions(forced[1]["library"]) == 0


@needs_compiler
@needs_avx2
@needs_objdump
@pytest.mark.slow
@pytest.mark.parametrize("processor", ["x86-64-v4", "sapphirerapids"])
def test_every_kernel_compiles_for_avx_512_and_its_instructions_are_seen(tmp_path, processor):
    """Without and with products of bfloat16, whatever this machine has; that they are seen confirms the test above."""
    units = [source for source in build.sources() if source.suffix == ".cpp"]
    line = [*build.compiler(), *compile_units.UNIT_FLAGS, f"-march={processor}", "-O1"]
    compile_units.compile_library(line, units, tmp_path / "kernels.so", calls_torch=False)
    assert evex_instructions(tmp_path / "kernels.so") > 1000
