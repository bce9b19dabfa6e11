"""The kernels on aarch64: every unit compiles there, and under emulation they pass the tests that ours pass here.

Needs a cross compiler and an emulator, Debian's g++-aarch64-linux-gnu and qemu-user. K31_AARCH64_EVERY=1 runs all of
the kernels' tests, and not one of many.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k31compile.kernels.cpu import build, calls, compile_units

TESTS = Path(__file__).parent
HELPERS = TESTS / "emulated"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# What -march=native comes to: on the first machines of that architecture, and on newer ones with products of bfloat16.
FIRST, NEWER = "-march=armv8-a", "-march=armv8.2-a+bf16"
EVERY = int(os.environ.get("K31_AARCH64_EVERY", "7"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"no {COMPILER}: Debian's package g++-aarch64-linux-gnu"),
]
needs_emulator = pytest.mark.skipif(not shutil.which(EMULATOR), reason=f"no {EMULATOR}: Debian's package qemu-user")
needs_host_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for this machine")
UNITS = [source for source in build.sources() if source.suffix == ".cpp"]


def ran(*line, **options):
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, check=False, timeout=500, **options)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The library as build.py makes it there."""
    made = tmp_path_factory.mktemp("aarch64") / "kernels.so"
    compile_units.compile_library([COMPILER, *compile_units.UNIT_FLAGS, FIRST], UNITS, made, calls_torch=False)
    return made


def test_the_units_by_which_torch_calls_compile():
    folder = Path(torch.__file__).parent
    units = [unit for unit in UNITS if unit.name.startswith(("serve_", "torch_"))]
    assert len(units) > 2
    for unit in units:
        flags = compile_units._flags(unit, folder)
        ran(COMPILER, *compile_units.UNIT_FLAGS, FIRST, *flags, "-fsyntax-only", unit)


def test_every_kernel_compiles_for_newer_processors(tmp_path):
    line = [COMPILER, *compile_units.UNIT_FLAGS, NEWER, "-O1"]
    compile_units.compile_library(line, UNITS, tmp_path / "kernels.so", calls_torch=False)


@needs_emulator
@needs_host_compiler
def test_the_tests_of_the_kernels_pass_there(kernels, tmp_path):
    driver, allocator = tmp_path / "driver", tmp_path / "allocator.so"
    ran(COMPILER, "-std=c++17", "-O1", HELPERS / "driver.cpp", "-o", driver, "-ldl")
    folder = Path(torch.__file__).parent
    flags = [*compile_units._flags(Path("torch_calls.cpp"), folder), *compile_units._libraries(folder)]
    ran(*build.compiler(), HELPERS / "allocator.cpp", *flags, "-shared", "-fPIC", "-o", allocator)
    system = Path(ran(COMPILER, "-print-file-name=libc.so.6").strip()).resolve().parents[1]
    given = {"run": [EMULATOR, "-L", str(system), str(driver)], "library": str(kernels)}
    variables = {
        "K31_ELSEWHERE": json.dumps({**given, "allocator": str(allocator), "every": EVERY}),
        "K31_TEST_IMPLEMENTATIONS": "cpu-elsewhere",
        "K31_CPU_KERNELS": "0",  # what this machine's own kernels would serve is none of it
        "PYTHONPATH": os.pathsep.join([*sys.path, str(HELPERS)]),
    }
    pytest_line = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "emulated_kernels", "-p", "no:cacheprovider"]
    said = ran(*pytest_line, "--strict-markers", TESTS, env=os.environ | variables, cwd=TESTS.parents[1])
    passed = re.search(r"^(\d+) passed, \d+ deselected in ", said, re.MULTILINE)
    assert passed, said[-2000:]
    assert int(passed[1]) > 1000 / EVERY
    called = json.loads(re.search(r"^calls: (.*)$", said, re.MULTILINE)[1])
    assert {name for name in calls.FUNCTIONS if called.get(name, 0) < 3} == set(), called
