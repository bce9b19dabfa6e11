"""A small entry for tests of the store, also for the processes that they start."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEY = "3f2a" * 16
OTHER = "77aa" * 16
FILES = {"graph.txt": b"graph():\n    return x + 1\n", "library.so": b"\x7fELF" + bytes(range(256)) * 40}
INGREDIENTS = {"graph": "ab" * 32, "inputs": "t0 [1,64] float32\nt1 [4] int64", "torch": "2.13.0"}
PROGRAM = {"calls": ["library.so"], "outputs": [0]}


def put(store, key=KEY, ingredients=INGREDIENTS, files=FILES):
    """Publish an entry with these few parts and return what the store returned."""
    return store.publish(key, "native", ingredients, PROGRAM, {"fused": {"short_conv": 2}}, files)


def left_over(store) -> list[str]:
    """What a store holds beside entries and its note of sizes."""
    folders = [store.places.making, store.places.broken]
    return sorted(path.name for folder in folders if folder.exists() for path in folder.iterdir())


def child(code: str, *arguments, before=(), **options) -> subprocess.Popen:
    """Start a process that runs some code with the store, the cases above and `sys.argv` at hand."""
    head = (
        "import os, sys, time, warnings\n"
        "from pathlib import Path\n"
        "from store_cases import FILES, KEY, OTHER, put\n"
        "from k31compile.cache.entry_store import EntryStore\n"
        "from k31compile.cache.limits import Limits\n"
        "store = EntryStore(Path(sys.argv[1]))\n"
    )
    paths = f"{ROOT}{os.pathsep}{Path(__file__).parent}"
    return subprocess.Popen(
        [*before, sys.executable, "-P", "-c", head + code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def ended(process: subprocess.Popen) -> str:
    """Wait for a process that must succeed and return what it printed and said."""
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, output + errors
    return output + errors
