"""Half-written libraries of Inductor's cache, taken away: a compiler that is killed leaves one, and Inductor trusts it.

Inductor builds `KEY.main.so` in its place, beside a folder `KEY.main_CxxBuild` that goes when the compiler has ended,
and takes any file of that name for a library ever after. Whose lock nobody holds, and whose folder is still there, was
never finished.
"""

import contextlib
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

_MARK = "_CxxBuild"
_OUTPUTS = (".so", ".o")


def remove_unfinished_builds(cache: Path) -> list[Path]:
    """Remove what compilers left unfinished in an Inductor cache, and return the files that are gone.

    What another process builds right now is under its lock, and stays.
    """
    removed: list[Path] = []
    for folder in sorted(cache.glob(f"*/*{_MARK}")):
        name = folder.name.removesuffix(_MARK)
        lock = cache / "locks" / f"{name.partition('.')[0]}.lock"
        with contextlib.suppress(Timeout, OSError), FileLock(lock, timeout=0):
            for output in (folder.with_name(name + ending) for ending in _OUTPUTS):
                if output.exists() and folder.exists():
                    output.unlink()
                    removed.append(output)
            shutil.rmtree(folder, ignore_errors=True)
    return removed
