"""Building the C++ kernels: one library, kept under the user's cache, trusted only when signed and private.

The file's name is a digest of what decides its meaning: sources, flags, instruction set, torch's version where the
library calls torch, and the compiler where CXX names one. Which version of the compiler built it is written behind it:
finding it again must not start a compiler, and a machine without one takes what another has built.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from k31compile import cpu_isa
from k31compile.cpu_isa import instruction_set
from k31compile.errors import BuildError, StoreError
from k31compile.kernels.cpu.compile_units import UNIT_FLAGS, compile_library
from k31compile.signatures import is_signed, local_key, sign
from k31compile.store import atomic_write, cache_dir, check_private, sha256_of

_FOLDER = Path(__file__).parent
SERVING = "fast"
# These beside it force what other machines take, so that tests reach it on any machine: narrow vectors and no special
# instruction; AVX2 and nothing newer, where the machine is an x86; the widest vectors with bf16 pairs, as on AVX-512
# with BF16.
FORCED: dict[str, tuple[str, ...]] = {
    "portable": cpu_isa.FLAGS[cpu_isa.PORTABLE],
    "avx2": cpu_isa.FLAGS[cpu_isa.AVX2],
    "wide": ("-march=native", "-DK31_LANES=16", "-DK31_PAIRS", "-O1"),
}


def compiler() -> list[str] | None:
    """The C++ compiler's command line (``CXX`` decides, else g++), or None when there is none on PATH."""
    words = shlex.split(os.environ.get("CXX") or "g++")
    found = shutil.which(words[0]) if words else None
    return [found, *words[1:]] if found else None


def flags(variant: str) -> tuple[str, ...]:
    """What the compiler is told for a variant, beside UNIT_FLAGS; OptionError where K31_CPU_ISA cannot be served."""
    return cpu_isa.FLAGS[cpu_isa.chosen()] if variant == SERVING else FORCED[variant]


def sources() -> list[Path]:
    """The kernels' source files, headers included, in a fixed order."""
    return sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")])


def build_key(variant: str) -> str:
    """Digest of sources, flags, instruction set, CXX, and of torch's version where the library calls torch."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    called = torch.__version__ if variant == SERVING else ""
    for part in (os.environ.get("CXX", ""), *UNIT_FLAGS, *flags(variant), instruction_set(), called):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def kept_at(variant: str) -> Path:
    """Where the library of a variant lies once it is built; neither it nor its folder needs to be there."""
    return cache_dir() / "kernels" / f"cpu-{build_key(variant)}.so"


def built_library(variant: str = "fast") -> Path:
    """The shared library of a variant, from the cache when it is there and sound, else built now.

    Raises BuildError when there is no compiler, the build fails, or the cache folder cannot be trusted.
    """
    command = compiler()
    if lacking := cpu_isa.lacks(variant):
        raise BuildError(f"this machine lacks {', '.join(lacking)}, and a library that uses it would end the process")
    try:
        folder = _private_folder()
        path = folder / f"cpu-{build_key(variant)}.so"
        if path.exists():
            fault = _fault(path, local_key())
            if fault is None:
                return path
            _set_aside(path, fault)
        if os.environ.get("K31_REQUIRE_WARM") == "1":
            raise BuildError("the kernels are not in the cache, and K31_REQUIRE_WARM=1 forbids to build them")
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
        units = [source for source in sources() if source.suffix == ".cpp"]
        compile_library([*command, *UNIT_FLAGS, *flags(variant)], units, made, calls_torch=variant == SERVING)
        made.chmod(0o600)
        seal = {"sha256": sha256_of(made), "compiler": _version(tuple(command))}
        # One rename publishes both: the seal travels behind the library, as the last line of the file.
        with made.open("ab") as file:
            file.write(_seal_line(seal))
        os.replace(made, path)


_SEAL_MARK = b"\nk31-seal:"
_SEAL_ROOM = 512
_NAME = re.compile(r"kernels/(cpu-[0-9a-f]{32}\.so)")


def _seal_line(about: dict[str, str]) -> bytes:
    return _SEAL_MARK + json.dumps({**about, "hmac": sign(about["sha256"].encode(), local_key())}).encode()


def exported() -> Iterator[tuple[str, bytes]]:
    """The kept kernels that serve here, for a bundle: their name below the cache folder, and the file as it is.

    Raises:
        StoreError: the folder is not this user's own.
    """
    path = _private_folder() / f"cpu-{build_key(SERVING)}.so"
    if path.exists() and _fault(path, local_key()) is None:
        data = path.read_bytes()
        library, seal = _split(data)
        # The signature is this machine's; without it equal kernels are equal bytes.
        yield f"kernels/{path.name}", library + _SEAL_MARK + json.dumps({**seal, "hmac": ""}).encode()


def imported(name: str, body: bytes) -> None:
    """Keep kernels that another machine exported, under this user's signature; sound ones that are here stay.

    Whoever calls has verified that they may be believed.

    Raises:
        StoreError: it is not what `exported` gives.
    """
    found = _NAME.fullmatch(name)
    try:
        library, seal = _split(body)
        is_whole = hashlib.sha256(library).hexdigest() == seal["sha256"] and isinstance(seal["compiler"], str)
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if found is None or not is_whole:
        raise StoreError("holds no kernels", where=name, hint="export it again")
    path = _private_folder() / found[1]
    if not path.exists() or _fault(path, local_key()) is not None:
        about = {"sha256": str(seal["sha256"]), "compiler": str(seal["compiler"])}
        atomic_write(path, library + _seal_line(about))


def _split(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """The library and its seal; ValueError where it has none."""
    place = data.rfind(_SEAL_MARK, max(0, len(data) - _SEAL_ROOM))
    seal = json.loads(data[place + len(_SEAL_MARK) :]) if place >= 0 else None
    if not isinstance(seal, dict):
        raise ValueError("it has no seal")
    return data[:place], seal


def _fault(path: Path, key: bytes) -> str | None:
    """What is wrong with a kept library, or None when it is this user's own and unchanged."""
    try:
        check_private(path)
        library, seal = _split(path.read_bytes())
        digest, signature = str(seal["sha256"]), str(seal["hmac"])
    except (StoreError, OSError, ValueError, KeyError, TypeError) as error:
        return str(error)
    if hashlib.sha256(library).hexdigest() != digest:
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


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler did not run: {error}") from error
    return run.stdout.partition("\n")[0]
