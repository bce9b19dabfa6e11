"""Stand-ins for CANN's libraries, made from the installed torch_npu: every symbol that it lacks, returning 0.

They let `import torch_npu` and torchair's conversion run; nothing of a device does. Built once for a torch_npu version
and kept in the cache folder.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from k31compile.errors import BuildError
from k31compile.store import cache_dir
from k31compile.targets.ascend.offline.ge_definitions import read_definitions

MAIN = "libk31_cann_stub.so"
"""The library that holds all symbols; those with CANN's names only need it."""

_ANSWERS = Path(__file__).with_name("answers.cpp")
_PROVIDED = ("Py", "_Py", "_ITM", "__gmon", "_ZTH")


def built_stubs() -> Path:
    """The folder with the stand-ins for the installed torch_npu, built first when it is not there.

    Raises:
        BuildError: torch_npu is not installed, or there is no C++ compiler.
    """
    package = _package_folder()
    version = importlib.metadata.version("torch_npu")
    recipe = "".join(path.read_text(encoding="utf-8") for path in (_ANSWERS, Path(__file__)))
    mark = hashlib.sha256(f"{version}:{recipe}".encode()).hexdigest()[:16]
    folder = cache_dir() / f"ascend-stubs-{version}-{mark}"
    if not (folder / MAIN).is_file():
        with tempfile.TemporaryDirectory(dir=cache_dir()) as work:
            made = Path(work) / folder.name
            made.mkdir()
            _build(package, made)
            _publish(made, folder)
    return folder


def _publish(built: Path, folder: Path) -> None:
    """Put a built folder in its place at once: another process must never load half a library."""
    try:
        built.rename(folder)
    except OSError:
        # Another process was faster, with the same libraries.
        if not (folder / MAIN).is_file():
            raise


def stub_names(folder: Path) -> list[str]:
    """The libraries with CANN's names in a folder of stand-ins."""
    return sorted(path.name for path in folder.glob("*.so") if path.name != MAIN)


def _package_folder() -> Path:
    found = importlib.util.find_spec("torch_npu")
    if found is None or not found.submodule_search_locations:
        raise BuildError(
            "torch_npu is not installed, and the conversion is torchair's",
            hint="run: make .venv-ascend, and use its k31; or pip install 'k31compile[ascend]' into a venv of its own",
        )
    return Path(next(iter(found.submodule_search_locations)))


def _build(package: Path, work: Path) -> None:
    libraries = sorted(package.rglob("*.so"))
    torch_libraries = sorted((package.parent / "torch" / "lib").glob("*.so*"))
    defined = {symbol for library in (*libraries, *torch_libraries) for symbol in _symbols(library, "--defined-only")}
    wanted = {symbol for library in libraries for symbol in _symbols(library, "--undefined-only")}
    answers = work / "answers.o"
    _run(["g++", "-O1", "-std=c++17", "-fPIC", "-c", str(_ANSWERS), "-o", str(answers)])
    defined |= set(_symbols(answers, "--defined-only", dynamic=False)) | _of_the_system(libraries)
    missing = sorted(symbol for symbol in wanted - defined if not symbol.startswith(_PROVIDED))
    source = work / "missing.c"
    source.write_text("".join(f'long stub_{i}(void) __asm__("{symbol}");\nlong stub_{i}(void) {{ return 0; }}\n'
                              for i, symbol in enumerate(missing)))  # fmt: skip
    definitions = read_definitions(package / "dynamo" / "torchair")
    lines = [definition.line(name) for name, definition in sorted(definitions.items())]
    (work / "definitions.txt").write_text("\n".join(lines) + "\n")
    _run(["gcc", "-fPIC", "-c", str(source), "-o", str(work / "missing.o")])
    _link(work / MAIN, [str(answers), str(work / "missing.o"), "-lstdc++", "-ldl"])
    present = {library.name for library in (*libraries, *torch_libraries)}
    for name in sorted({name for library in libraries for name in _needed(library)} - present):
        if not name.startswith(("libstdc++", "libgcc_s", "libc.", "libm.", "libdl.", "libpthread.", "librt.", "ld-")):
            _link(work / name, ["-Wl,--no-as-needed", f"-L{work}", f"-l:{MAIN}", "-Wl,-rpath,$ORIGIN"])
    for left in ("answers.o", "missing.o", "missing.c"):
        (work / left).unlink()


def _of_the_system(libraries: Sequence[Path]) -> set[str]:
    """What the C and C++ runtime defines: the linker says where each of its libraries is."""
    found: set[str] = set()
    for name in sorted({name for library in libraries for name in _needed(library)}):
        place = _run(["gcc", f"-print-file-name={name}"]).strip()
        if os.path.isabs(place):
            found.update(_symbols(Path(place), "--defined-only"))
    return found


def _symbols(library: Path, which: str, dynamic: bool = True) -> Iterator[str]:
    for line in _run(["nm", *(["-D"] if dynamic else []), which, str(library)]).splitlines():
        if line.split():
            yield line.split()[-1].split("@")[0]


def _needed(library: Path) -> Iterator[str]:
    for line in _run(["readelf", "-d", str(library)]).splitlines():
        if "(NEEDED)" in line:
            yield line.split("[")[1].split("]")[0]


def _link(library: Path, arguments: Sequence[str]) -> None:
    _run(["gcc", "-shared", "-fPIC", "-o", str(library), f"-Wl,-soname,{library.name}", *arguments])


def _run(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise BuildError(
            f"{command[0]} is not installed", hint="apt-get install g++ (binutils comes with it)"
        ) from None
    except subprocess.CalledProcessError as error:
        why = (error.stderr or "").strip().splitlines()[:1]
        raise BuildError(f"{command[0]} failed while CANN's stand-ins were built: {' '.join(why)}") from error
