"""A plugin for pytest: "cpu-elsewhere" is the C++ kernels in a process of another architecture, called as our own are.

The process sees torch's memory at the addresses that it has here, so a call's structure goes there as it is.
K31_ELSEWHERE holds, as JSON: `run`, the command line that starts tests/kernels/emulated/driver.cpp; `library`, the
kernels; `allocator`, the built allocator.cpp; `every`, of how many collected tests one is run.
"""

import ctypes
import json
import os
import subprocess
import threading
from collections import Counter

import pytest
import torch

from k31compile.kernels.cpu import calls, loader

VARIANT = "elsewhere"
ADDRESS, BYTES = 0x20_0000_0000, 1 << 33
GIVEN = json.loads(os.environ["K31_ELSEWHERE"])


class Elsewhere:
    """Looks like the loaded library: each attribute is a kernel that takes ctypes.byref of its structure."""

    def __init__(self, run, library, file):
        line = [*run, library, str(file), str(ADDRESS), str(BYTES)]
        # Threads that spin while they wait cost most of the time of an emulated process.
        environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(line, text=True, bufsize=1, env=environment, pass_fds=[file], **pipes)
        self._lock = threading.Lock()
        self._room = torch.empty(1 << 16, dtype=torch.uint8)
        self.called = Counter()

    def ask(self, function, address):
        print(function, address, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"{function}: the process ended with {self._process.wait()}"
        return int(answer)

    def __getattr__(self, function):
        def call(reference):
            structure, size = reference._obj, ctypes.sizeof(reference._obj)
            assert type(structure) is calls.FUNCTIONS[function]
            assert size <= self._room.nbytes
            with self._lock:
                ctypes.memmove(self._room.data_ptr(), ctypes.addressof(structure), size)
                status = self.ask(function, self._room.data_ptr())
                ctypes.memmove(ctypes.addressof(structure), self._room.data_ptr(), size)
                self.called[function] += 1
            return status

        return call


def _shared(banks):
    """What calls.sum_operands gives, in memory that the other process sees."""
    operands = SUM_OPERANDS(banks)
    room = torch.empty(max(ctypes.sizeof(operands), 1), dtype=torch.uint8)
    ctypes.memmove(room.data_ptr(), ctypes.addressof(operands), ctypes.sizeof(operands))
    return type(operands).from_buffer(room.numpy())


SUM_OPERANDS = calls.sum_operands
calls.sum_operands = _shared
_file = os.memfd_create("torch")
os.truncate(_file, BYTES)
_refused = ctypes.CDLL(GIVEN["allocator"]).serve_torch(_file, ctypes.c_size_t(ADDRESS), ctypes.c_size_t(BYTES))
assert not _refused, "torch's memory does not map where it shall"
_elsewhere = Elsewhere(GIVEN["run"], GIVEN["library"], _file)
_sizes = {name: _elsewhere.ask(f"{name}_size", 0) for name in calls.FUNCTIONS}
assert _sizes == {name: ctypes.sizeof(kind) for name, kind in calls.FUNCTIONS.items()}, _sizes
loader._LOADED[VARIANT] = _elsewhere
loader._SERVES[VARIANT] = True, "C++ kernels in a process of another architecture"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    meant = [item for item in items if f"cpu-{VARIANT}" in item.name][:: GIVEN["every"]]
    kept = {*meant}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = meant


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"calls: {json.dumps(_elsewhere.called)}")
