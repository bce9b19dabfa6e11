"""What a run ran on: processor, memory, threads, the setting of malloc and its effect, versions."""

from __future__ import annotations

import os
import platform
import resource
from importlib import metadata
from pathlib import Path
from typing import Any

KEEPING = {
    "MALLOC_MMAP_THRESHOLD_": "2147483647",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_ARENA_MAX": "1",
}
"""glibc's setting under which large temporaries stay with the process: the harder setting for the baselines.

One arena for all threads: only of that one malloc_trim gives everything back, which the measuring of memory needs.
"""


def machine_facts(threads: int) -> dict[str, Any]:
    """The machine as it shows itself, with what malloc does here with a large temporary."""
    import torch

    from k31compile.kernels import provider_for

    set_here = {name: os.environ[name] for name in KEEPING if name in os.environ}
    return {
        "processor": _cpu_model(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "caches": _caches(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_products": bool(torch.cpu._is_avx512_bf16_supported()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": threads,
        "time": "CPU time of the one thread" if threads == 1 else "wall time",
        "load": round(os.getloadavg()[0], 2),
        "malloc": set_here,
        "malloc_keeps_temporaries": _keeps_temporaries(),
        "provider": provider_for("lightning_indexer").provider,
    }


def version_facts() -> dict[str, str]:
    """Versions of what takes part."""
    import torch

    return {
        "k31compile": metadata.version("k31compile"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "system": platform.system(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found


def _keeps_temporaries() -> bool:
    """Whether a large tensor that was freed is there again without page faults, once the heap has settled."""
    import torch

    size, page, faults = 64 << 20, os.sysconf("SC_PAGE_SIZE"), []
    for _ in range(24):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(size, dtype=torch.uint8)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults[-8:]) < size // page // 4
