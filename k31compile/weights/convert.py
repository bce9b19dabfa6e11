"""Conversion of a checkpoint between plain tensors and blocks: tensor by tensor, resumed where it stopped.

At most one matrix of the largest tensor is in memory, twice. Each shard appears whole or not at all, and a journal with
its hash says that it is finished.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from k31compile.errors import WeightFileError
from k31compile.store import atomic_file, atomic_write, sha256_of
from k31compile.weights.blocks import blocks_of, matrices_of
from k31compile.weights.checkpoint import INDEX_FILE, Checkpoint, Shard, open_checkpoint
from k31compile.weights.journal import Finished, Journal, alone_in
from k31compile.weights.plan import LAYOUTS, Plan, Step, make_plan
from k31compile.weights.record import KEY, NZ, FileRecord, TensorRecord, read_record
from k31compile.weights.rules import Choose, by_name
from k31compile.weights.tensor_file import HashingWriter, signature, write_header

_BESIDE = (".json", ".txt", ".model", ".jinja")
"""What goes along with a checkpoint: its configuration and its tokenizer, by the end of the name."""


def convert(
    source: str | Path,
    destination: str | Path,
    layout: str = NZ,
    choose: Choose = by_name,
    advance: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Write a checkpoint into a folder with its weights in another layout, and return what was done with each tensor.

    `choose` decides which tensors become blocks; `advance` is called with the name of each shard before it is written.
    An interrupted call that is repeated goes on where it stopped. `layout="nd"` gives the original back, bit for bit.

    Raises:
        WeightFileError: the source is damaged, nothing would change, or the destination cannot be written.
    """
    return write(plan_of(source, layout, choose), Path(destination), advance)


def plan_of(source: str | Path, layout: str = NZ, choose: Choose = by_name) -> Plan:
    """What `convert` would do; nothing is written."""
    if layout not in LAYOUTS:
        raise WeightFileError(f"there is no layout {layout!r}", hint=f"layouts: {', '.join(LAYOUTS)}")
    return make_plan(open_checkpoint(Path(source)), layout, choose)


def write(plan: Plan, folder: Path, advance: Callable[[str], None] = lambda _: None) -> Plan:
    """Carry out a plan.

    Raises:
        WeightFileError: the folder cannot be written, is the source itself, or holds something else.
    """
    source = plan.source
    made: list[Path] = []
    with _told(folder), _tidied(made):
        if folder.exists() and folder.samefile(source.path if source.path.is_dir() else source.path.parent):
            raise WeightFileError("source and destination are one folder", where=str(folder), hint="give another one")
        made += _make(folder)
        with alone_in(folder):
            _write_all(plan, folder, advance)
        made.clear()
    return plan


def _write_all(plan: Plan, folder: Path, advance: Callable[[str], None]) -> None:
    journal = Journal.opened(folder, plan.identity())
    beside = [path.name for path in _beside(plan.source.path)]
    journal.remove_partial([*(shard.name for shard in plan.source.shards), *beside, INDEX_FILE])
    has_digests = isinstance(_digests_of(plan.source), Mapping)
    try:
        journal.save()
        for shard in plan.source.shards:
            advance(shard.name)
            _write_shard(plan, shard, journal, has_digests)
        _write_beside(plan, folder)
        _write_index(plan, folder, journal)
    except BaseException:
        if not journal.finished:
            journal.remove()
        raise
    journal.remove()


def _write_shard(plan: Plan, shard: Shard, journal: Journal, has_digests: bool) -> None:
    before = signature(shard.file.path)
    source_hash = sha256_of(shard.file.path)
    if journal.is_done(shard.name, source_hash):
        return
    steps = sorted(plan.of(shard), key=lambda step: step.tensor.begin)
    digests: dict[str, str] = {}
    with atomic_file(journal.folder / shard.name, mode=0o644) as file:
        out = HashingWriter(file)
        write_header(out, _metadata(plan, shard, source_hash), {step.tensor.name: step.stored for step in steps})
        for step in steps:
            digest = hashlib.sha256()
            for piece in _pieces(step):
                out.write(piece)
                if has_digests:
                    digest.update(piece)
                del piece  # the next one is made before this name is free
            if has_digests:
                digests[step.tensor.name] = digest.hexdigest()
        if signature(shard.file.path) != before:
            raise WeightFileError(
                "the file was changed while it was read", where=str(shard.file.path), hint="run it again"
            )
    journal.add(shard.name, Finished(out.hexdigest(), source_hash, digests))


def _pieces(step: Step) -> Iterator[bytes | memoryview]:
    file = step.shard.file
    if not step.is_changed:
        return file.pieces(step.tensor)
    if step.layout == NZ:
        return blocks_of(file, step.tensor)
    return matrices_of(file, step.tensor, step.before.shape)


def _metadata(plan: Plan, shard: Shard, source_hash: str) -> dict[str, str] | None:
    """What a file says of itself; None where it has no metadata at all."""
    record = read_record(shard.file)
    is_said_empty = shard.file.is_said_empty if record is None else record.is_said_empty
    kept = {key: value for key, value in shard.file.metadata.items() if key != KEY}
    steps = list(plan.of(shard))
    if all(step.layout != NZ for step in steps):
        return kept if kept or is_said_empty else None
    tensors = {s.tensor.name: TensorRecord(s.layout, s.before.shape, s.before.dtype) for s in steps}
    return kept | {
        KEY: FileRecord(f"k31compile {version('k31compile')}", source_hash, tensors, is_said_empty).to_text()
    }


def _write_beside(plan: Plan, folder: Path) -> None:
    for path in _beside(plan.source.path):
        atomic_write(folder / path.name, path.read_bytes(), mode=0o644)


def _beside(source: Path) -> list[Path]:
    """The files of a checkpoint's folder that go along with it; none where it is a single file."""
    found = sorted(source.iterdir()) if source.is_dir() else []
    return [
        path
        for path in found
        if path.is_file() and path.suffix in _BESIDE and path.name != INDEX_FILE and not path.name.startswith(".")
    ]


def _write_index(plan: Plan, folder: Path, journal: Journal) -> None:
    if plan.source.index is None:
        return
    index = copy.deepcopy(plan.source.index)
    metadata = index.get("metadata")
    if isinstance(metadata, dict) and "total_size" in metadata:
        metadata["total_size"] = sum(step.stored[2] for step in plan.steps)
    if (digests := _digests_of(plan.source)) is not None:
        written = {name: digest for entry in journal.finished.values() for name, digest in entry.tensors.items()}
        index["metadata"]["sha256"] = {name: written[name] for name in digests if name in written}
    atomic_write(folder / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode(), mode=0o644)


def _digests_of(source: Checkpoint) -> Mapping[str, str] | None:
    """The hashes of tensors that an index may hold, by name."""
    metadata = (source.index or {}).get("metadata")
    digests = metadata.get("sha256") if isinstance(metadata, dict) else None
    return digests if isinstance(digests, dict) else None


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it, and return the ones that were not there, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


@contextmanager
def _tidied(made: list[Path]) -> Iterator[None]:
    """Remove the folders that were made for a conversion that wrote nothing into them."""
    try:
        yield
    except BaseException:
        for path in made:
            try:
                path.rmdir()
            except OSError:
                break
        raise


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What the system says of a full disk or a folder that cannot be written, as one line."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or folder)
        hint = "what was being written is removed; the same call goes on with the shards that are finished"
        raise WeightFileError(
            f"the folder cannot be written: {error.strerror or error}", where=where, hint=hint
        ) from error
