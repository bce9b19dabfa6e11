"""The text: source files of the Python standard library that runs this, whole files held out by a hash rule."""

import hashlib
import lzma
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SEPARATOR = b"\0"
HELD_OUT_ONE_IN = 20
# Left out: tables and prose that are no programs (encodings, pydoc_data), what many distributions do not ship (test,
# idlelib, lib2to3, ensurepip), and what is not the library's own (site-packages).
_FOREIGN = ("site-packages", "dist-packages", "__pycache__", "_bundled", "ensurepip")
_OFTEN_ABSENT = ("test", "tests", "idle_test", "idlelib", "lib2to3")
SKIPPED_FOLDERS = frozenset((*_FOREIGN, *_OFTEN_ABSENT, "encodings", "pydoc_data"))


@dataclass(frozen=True)
class Corpus:
    """Train and held-out text as one uint8 stream each, a zero byte after every file; and the held-out files."""

    train: Tensor
    held_out: Tensor
    held_out_files: tuple[bytes, ...]
    num_train_files: int

    @property
    def digest(self) -> str:
        """A name for this text: another Python has other files."""
        return hashlib.sha256(self.train.numpy().tobytes() + self.held_out.numpy().tobytes()).hexdigest()[:16]


def is_held_out(name: str) -> bool:
    """Whether the file `name`, a posix path below the library's folder, is never trained on."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % HELD_OUT_ONE_IN == 0


def read_corpus(folder: Path | None = None) -> Corpus:
    """Read all library files below `folder`, by default that of the running interpreter."""
    folder = folder if folder is not None else Path(sysconfig.get_path("stdlib"))
    sides: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if SKIPPED_FOLDERS.isdisjoint(name.parts) and path.stat().st_size:
            sides[is_held_out(name.as_posix())].append(path.read_bytes())
    if not sides[True] or not sides[False]:
        raise SystemExit(f"{folder} holds too few .py files to train on: is the standard library zipped or missing?")
    return Corpus(_stream(sides[False]), _stream(sides[True]), tuple(sides[True]), len(sides[False]))


def _stream(files: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(SEPARATOR.join(files) + SEPARATOR), dtype=torch.uint8)


def training_rows(corpus: Corpus, seed: int, step: int, rows: int, length: int) -> Tensor:
    """The batch of one step, int64 [rows, length + 1]: a function of (seed, step), so a resumed run sees the same."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(corpus.train) - length, (rows,), generator=generator)
    return torch.stack([corpus.train[start : start + length + 1] for start in starts]).long()


def held_out_rows(corpus: Corpus, length: int, count: int | None = None) -> Tensor:
    """Windows of the held-out text that do not overlap, int64 [n, length + 1]: `count` evenly spread ones, or all."""
    starts = torch.arange(0, len(corpus.held_out) - length, length)
    if count is not None:
        starts = starts[torch.linspace(0, len(starts) - 1, min(count, len(starts))).long()]
    return torch.stack([corpus.held_out[start : start + length + 1] for start in starts]).long()


def compressed_bits_per_byte(files: tuple[bytes, ...]) -> dict[str, float]:
    """What zlib -9 and xz need for the same files, each file on its own, in bits per byte."""
    size = sum(len(text) for text in files)
    return {
        "zlib": 8 * sum(len(zlib.compress(text, 9)) for text in files) / size,
        "xz": 8 * sum(len(lzma.compress(text, preset=9)) for text in files) / size,
    }
