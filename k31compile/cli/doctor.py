"""``k31 doctor``: what this machine has, what it lacks, and what to do about it; works without torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console

import k31compile
from k31compile import cpu_isa, store
from k31compile.cli import console, environment
from k31compile.errors import OptionError, StoreError

_TORCH = "2.13"
_REMEDY_AUTOLOAD = f"in your own scripts, before they import torch: export {environment.AUTOLOAD}=0"
_PROBE = """
#include <omp.h>
extern "C" __attribute__((visibility("default"))) int k31_probe() { return omp_get_max_threads(); }
"""
# Those of k31compile.kernels.cpu.compile_units, which cannot be asked: it stands behind an import of torch.
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
_TELLING = re.compile(r"^[\w.]*(?:Error|Exception)\b|\berror: ")
_ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_EXTRAS = {"transformers": "hf", "torch-npu": "ascend"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; ``status`` is ok, warn (something serves instead) or fail."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def doctor() -> int:
    """Check Python, torch, torch-npu, the compiler, the cache folder and the CPU."""
    checks = [
        check() for check in (_python, _torch, _torch_import, _torch_npu, _compiler, _cache_folder, _cpu, _extras)
    ]
    broken = any(check.status == "fail" for check in checks)
    data = {
        "ok": not broken,
        "checks": [asdict(check) for check in checks],
        "versions": {
            "k31compile": k31compile.__version__,
            "python": platform.python_version(),
            "torch": _version("torch"),
        },
    }
    console.emit(data, lambda out: _render(checks, out))
    return 1 if broken else 0


def _render(checks: list[Check], out: Console) -> None:
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in checks:
        out.print(f"[{colours[check.status]}]{check.status:4}[/] {check.name}: ", end="", highlight=False)
        out.print(check.detail, markup=False, highlight=False)
        if check.remedy:
            out.print(f"     -> {check.remedy}", markup=False, highlight=False)


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _torch() -> Check:
    version = _version("torch")
    if version is None:
        return Check("torch", "fail", "not installed", f"pip install 'torch=={_TORCH}.*'")
    if not version.startswith(f"{_TORCH}."):
        remedy = f"pip install 'torch=={_TORCH}.*'"
        return Check("torch", "fail", f"{version}, but this version of k31compile needs {_TORCH}", remedy)
    return Check("torch", "ok", version)


def _torch_import() -> Check:
    as_user = environment.of_user()
    error = _import_error("torch", as_user)
    if error is None:
        return Check("import torch", "ok", "works, also in your own scripts")
    if _import_error("torch", {**as_user, environment.AUTOLOAD: "0"}) is None:
        detail = f"fails in your own scripts, by the autoload of a vendor package ({error}); k31 turns that off"
        return Check("import torch", "warn", detail, _REMEDY_AUTOLOAD)
    return Check("import torch", "fail", error, f"install it anew: pip install --force-reinstall 'torch=={_TORCH}.*'")


def _torch_npu() -> Check:
    version = _version("torch-npu")
    if version is None:
        return Check("torch-npu", "ok", "not installed; only Ascend targets need it")
    if _cann() is None:
        detail = f"{version} without CANN: `import torch` can fail by its autoload"
        return Check("torch-npu", "warn", detail, _REMEDY_AUTOLOAD)
    return Check("torch-npu", "ok", f"{version}, CANN at {_cann()}")


def _cann() -> str | None:
    named = (os.environ.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"))
    usual = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
    return next((path for path in (*named, *usual) if path and Path(path).is_dir()), None)


def _compiler() -> Check:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    serves = "until then the reference implementations serve, with codegen='ops'"
    if shutil.which(command[0]) is None:
        return Check("compiler", "warn", f"no {command[0]}", f"install g++, or set CXX; {serves}")
    error = _build_error(command)
    if error:
        return Check("compiler", "warn", f"{command[0]} cannot build a kernel: {error}", f"repair it; {serves}")
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    return Check("compiler", "ok", f"{version.splitlines()[0] if version else command[0]}; builds and loads a kernel")


def _build_error(command: list[str]) -> str | None:
    try:
        parent: Path | None = store.cache_dir()  # where kernels will lie: a noexec mount shows here
    except StoreError:
        parent = None
    with tempfile.TemporaryDirectory(dir=parent, prefix="doctor-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROBE)
        line = [*command, *_FLAGS, *cpu_isa.FLAGS[_chosen_isa()], "-shared", "-o", str(library), str(source)]
        error = _run_error(line, dict(os.environ))
        if error:
            return error
        try:
            return None if ctypes.CDLL(str(library)).k31_probe() > 0 else "the built kernel answers wrongly"
        except OSError as problem:
            return str(problem)


def _cache_folder() -> Check:
    try:
        folder = store.cache_dir()
    except StoreError as error:
        return Check("cache folder", "fail", f"{error.what} ({error.where})", error.hint)
    free = shutil.disk_usage(folder).free / 2**30
    detail = f"{folder}, {free:.1f} GiB free"
    if free < 1:
        return Check("cache folder", "warn", detail, "free some space, or set K31_CACHE_DIR")
    return Check("cache folder", "ok", detail)


def _cpu() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    limit = f", OMP_NUM_THREADS={threads}" if threads else ""
    detail = f"{platform.machine()}, {cores} cores{limit}, {' '.join(_isa()) or 'ISA unknown'}"
    try:
        chosen = cpu_isa.chosen()
    except OptionError as error:
        return Check("cpu", "fail", f"{detail}; {error.what}", error.hint)
    forced = "" if chosen == cpu_isa.NATIVE else f"; kernels are built with {cpu_isa.VARIABLE}={chosen}"
    return Check("cpu", "ok", f"{detail}{forced}")


def _chosen_isa() -> str:
    try:
        return cpu_isa.chosen()
    except OptionError:  # which the line of the CPU tells
        return cpu_isa.NATIVE


def _isa() -> list[str]:
    present = set(cpu_isa.instruction_set().partition(":")[2].split())
    return [flag for flag in _ISA_FLAGS if flag in present]


def _extras() -> Check:
    said = []
    for package, extra in _EXTRAS.items():
        version = _version(package)
        said.append(f"{package} {version}" if version else f"{package} absent (pip install 'k31compile[{extra}]')")
    return Check("extras", "ok", ", ".join(said))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _import_error(module: str, env: dict[str, str]) -> str | None:
    return _run_error([sys.executable, "-c", f"import {module}"], env)


def _run_error(command: list[str], env: dict[str, str]) -> str | None:
    """Run a command and return None, or the line of its output that tells what went wrong."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    # the first one: of chained tracebacks it is the cause, of a compiler's messages the one that the rest follow
    telling = next(filter(_TELLING.search, lines), None)
    return telling or (lines[-1] if lines else f"exit code {done.returncode}")
