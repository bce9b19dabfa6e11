"""Building the C++ kernels: one compiler call, kept under the user's cache, trusted only when signed and private.

The file's name is a digest of what decides its meaning: sources, flags, instruction set, and the compiler where CXX
names one. Which version of the compiler built it is written behind it: finding it again must not start a compiler, and
a machine without one takes what another has built.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from k31compile.errors import BuildError, StoreError
from k31compile.signatures import is_signed, local_key, sign
from k31compile.store import cache_dir, check_private, sha256_of

_FOLDER = Path(__file__).parent
_COMMON = ("-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
# "fast" is what serves. The others force what other machines take, so that tests reach it on any machine: narrow
# vectors and no special instruction; the widest vectors with bf16 pairs, as on AVX-512 with BF16.
VARIANTS: dict[str, tuple[str, ...]] = {
    "fast": ("-march=native",),
    "portable": ("-DK31_LANES=4",),
    "wide": ("-march=native", "-DK31_LANES=16", "-DK31_PAIRS", "-O1"),
}
_TIMEOUT_SECONDS = 300


def compiler() -> list[str] | None:
    """The C++ compiler's command line (``CXX`` decides, else g++), or None when there is none on PATH."""
    words = shlex.split(os.environ.get("CXX") or "g++")
    found = shutil.which(words[0]) if words else None
    return [found, *words[1:]] if found else None


def sources() -> list[Path]:
    """The kernels' source files, headers included, in a fixed order."""
    return sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")])


def build_key(variant: str) -> str:
    """Digest of sources, flags, instruction set and CXX."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (os.environ.get("CXX", ""), *_COMMON, *VARIANTS[variant], instruction_set()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def built_library(variant: str = "fast") -> Path:
    """The shared library of a variant, from the cache when it is there and sound, else built now.

    Raises BuildError when there is no compiler, the build fails, or the cache folder cannot be trusted.
    """
    command = compiler()
    try:
        folder = _private_folder()
        path = folder / f"cpu-{build_key(variant)}.so"
        if path.exists():
            fault = _fault(path, local_key())
            if fault is None:
                return path
            _set_aside(path, fault)
        if command is None:
            raise BuildError("no C++ compiler on PATH", hint="install g++ or set CXX; until then the references serve")
        _build(command, variant, path)
    except (StoreError, OSError) as error:
        raise BuildError(f"the kernels cannot be kept: {error}") from error
    return path


def _build(command: list[str], variant: str, path: Path) -> None:
    # Built under a name of its own: processes that build at once never see each other's halves, and as their
    # files are equal in meaning it does not matter whose rename comes last.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as folder:
        made = Path(folder) / "kernels.so"
        units = [str(source) for source in sources() if source.suffix == ".cpp"]
        line = [*command, *_COMMON, *VARIANTS[variant], "-o", str(made), *units]
        try:
            run = subprocess.run(line, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"the C++ compiler did not run: {error}") from error
        if run.returncode:
            raise BuildError(f"the C++ compiler refused the kernels: {_first_error(run.stderr)}")
        made.chmod(0o600)
        seal = {"sha256": sha256_of(made), "compiler": _version(tuple(command))}
        seal["hmac"] = sign(seal["sha256"].encode(), local_key())
        # One rename publishes both: the seal travels behind the library, as the last line of the file.
        with made.open("ab") as file:
            file.write(_SEAL_MARK + json.dumps(seal).encode())
        os.replace(made, path)


_SEAL_MARK = b"\nk31-seal:"
_SEAL_ROOM = 512


def _fault(path: Path, key: bytes) -> str | None:
    """What is wrong with a kept library, or None when it is this user's own and unchanged."""
    try:
        check_private(path)
        data = path.read_bytes()
        place = data.rfind(_SEAL_MARK, max(0, len(data) - _SEAL_ROOM))
        if place < 0:
            return "it has no seal"
        seal = json.loads(data[place + len(_SEAL_MARK) :])
        digest, signature = str(seal["sha256"]), str(seal["hmac"])
    except (StoreError, OSError, ValueError, KeyError, TypeError) as error:
        return str(error)
    if hashlib.sha256(data[:place]).hexdigest() != digest:
        return "its content is not what was built"
    return None if is_signed(digest.encode(), signature, key) else "its seal is not this user's"


def _set_aside(path: Path, fault: str) -> None:
    aside = path.with_name(f"{path.name}.broken")
    warnings.warn(f"k31compile: kept kernels set aside and built anew, {fault} ({aside})", stacklevel=2)
    path.replace(aside)


def _private_folder() -> Path:
    folder = cache_dir() / "kernels"
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    return folder


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line]
    return (lines or output.splitlines() or ["no message"])[0].strip()


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler did not run: {error}") from error
    return run.stdout.partition("\n")[0]


@functools.cache
def instruction_set() -> str:
    """The line that names this machine's instructions, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"
