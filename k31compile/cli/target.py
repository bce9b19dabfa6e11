"""What TARGET on a command line means: a factory of the user's, or the name of a shipped entry."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k31compile.cli import entries as shipped
from k31compile.errors import EntryError, UsageError

if TYPE_CHECKING:
    from k31compile.entry import Entry

HELP = "package.module:factory, file.py:factory, or a shipped entry: pico, tiny, mini, full (also NAME:prefill)."
_FACTORY = "def factory(): return k31compile.Entry('name', model, (args,))"


def load_entries(target: str, dtype: str | None = None, layers: int | None = None) -> list[Entry]:
    """Return the entries that a target stands for.

    Raises:
        UsageError: there is no such target, or an option does not apply to it.
        EntryError: the factory failed or returned something else than entries.
        CheckpointError: the trained checkpoint is missing or damaged.
    """
    if dtype is not None and dtype not in shipped.DTYPES:
        raise UsageError(f"there is no dtype {dtype!r}", hint=f"dtypes: {', '.join(shipped.DTYPES)}")
    name, _, part = target.partition(":")
    if name in shipped.SHIPPED:
        if part and part not in shipped.PARTS:
            raise _unknown(target)
        return shipped.shipped_entries(name, part, dtype or "fp32", layers)
    if layers is not None:
        raise UsageError("--layers is for shipped entries; a factory decides by itself", where=target)
    found = _call(_factory(target), target)
    return found if dtype is None else [_in_dtype(entry, shipped.DTYPES[dtype]) for entry in found]


def is_shipped(target: str) -> bool:
    """Tell whether a target is an entry that is here, and not a factory."""
    return target.partition(":")[0] in shipped.SHIPPED


def _unknown(target: str) -> UsageError:
    close = difflib.get_close_matches(target, shipped.shipped_names(), n=1, cutoff=0.0)[0]
    names = f"{', '.join(shipped.SHIPPED)}, each also NAME:prefill, NAME:decode"
    return UsageError(
        f"there is no target {target!r}",
        hint=f"did you mean {close!r}? targets: package.module:factory, file.py:factory, {names}",
    )


def _factory(target: str) -> Callable[[], Any]:
    place, colon, name = target.rpartition(":")
    if not colon:
        if target.endswith(".py"):
            raise UsageError(f"{target} names no factory", hint=f"write {target}:factory, with {_FACTORY}")
        raise _unknown(target)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place, target)
    found = getattr(module, name, None)
    if found is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, functions, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"write {_FACTORY}"
        raise UsageError(f"{place} has no {name!r}", hint=hint)
    if not callable(found):
        raise EntryError(f"{target} is a {type(found).__name__}, not a function", hint=f"write {_FACTORY}")
    return found  # type: ignore[no-any-return]


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    name = f"k31_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _importable(path.resolve().parent), _blame(f"{path} cannot be imported"):
        spec.loader.exec_module(module)
    return module


def _from_module(name: str, target: str) -> Any:
    with _importable(Path.cwd()):
        try:
            present = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError, AttributeError):
            present = False
        if not present:
            wrong = _unknown(target)
            wrong.what += f": no module {name!r} can be imported from here"
            raise wrong
        with _blame(f"{name} cannot be imported"):
            return importlib.import_module(name)


def _call(factory: Callable[[], Any], target: str) -> list[Entry]:
    import torch

    from k31compile.entry import Entry

    with _blame(f"{target} failed"):
        made = factory()
    found = list(made) if isinstance(made, list | tuple) else [made]
    if isinstance(made, list | tuple) and not all(isinstance(item, Entry) for item in found):
        kinds = ", ".join(type(item).__name__ for item in found)
        raise EntryError(
            f"{target} returned a {type(made).__name__} ({kinds}), not an Entry or a list of them",
            hint=f"write {_FACTORY}",
        )
    for item in found:
        if isinstance(item, torch.nn.Module):
            raise EntryError(
                f"{target} returned the model alone ({type(item).__name__}), which does not say how it is called",
                hint="return k31compile.Entry('name', model, (args,)) or a list of them",
            )
        if not isinstance(item, Entry):
            raise EntryError(f"{target} returned a {type(item).__name__}, not an Entry", hint=f"write {_FACTORY}")
    if not found:
        raise EntryError(f"{target} returned an empty list", hint=f"write {_FACTORY}")
    return found


@contextmanager
def _blame(what: str) -> Iterator[None]:
    """Turn what the user's own code raises into one line that says so."""
    try:
        yield
    except Exception as error:
        raise EntryError(f"{what}: {type(error).__name__}: {error}", hint="--debug shows the traceback") from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let a folder be imported from, last: what is installed is never shadowed by what lies there."""
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _in_dtype(entry: Entry, name: str) -> Entry:
    """The entry with its model and its floating arguments in another dtype; the model is converted in place."""
    import dataclasses

    import torch
    from torch.utils import _pytree as pytree

    dtype = getattr(torch, name)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    model = entry.model.to(dtype) if isinstance(entry.model, torch.nn.Module) else entry.model
    args, kwargs = pytree.tree_map(cast, (entry.args, dict(entry.kwargs)))
    return dataclasses.replace(entry, model=model, args=args, kwargs=kwargs)
