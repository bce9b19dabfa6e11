"""Processes that begin with empty caches, for benchmarks: what an installation has once is there, nothing else."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k31compile.errors import BenchError
from k31compile.kernels.cpu.loader import library
from k31compile.store import cache_dir


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """An environment with caches of its own; in them are the library of our kernels and the key it is signed with."""
    library()
    with tempfile.TemporaryDirectory(prefix="k31-bench-") as folder:
        own = Path(folder) / "k31"
        own.mkdir(mode=0o700)
        shutil.copyfile(cache_dir() / "signing.key", own / "signing.key")
        (own / "signing.key").chmod(0o600)
        shutil.copytree(cache_dir() / "kernels", own / "kernels")
        yield {
            **os.environ,
            "K31_CACHE_DIR": str(own),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "K31_LOG": "error",
        }


def run_elsewhere(script: str, arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The JSON of the last line that a script prints in a process of its own; ends with its error where it fails."""
    command = [sys.executable, str(Path(script).resolve()), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{' '.join(arguments)} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def folder_size(folder: Path) -> tuple[int, int]:
    """Bytes and number of files below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    return sum(path.stat().st_size for path in files), len(files)
