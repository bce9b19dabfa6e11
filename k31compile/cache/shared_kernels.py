"""The built CPU kernels as an entry of a store, so that who finds graphs elsewhere builds none either."""

from __future__ import annotations

import hashlib
import os
import warnings

from k31compile.cache.entry_store import EntryStore
from k31compile.errors import BuildError
from k31compile.kernels.cpu import build, loader

_FILE = "kernels.so"
_VARIANT = "fast"


def kernels_key() -> str:
    """The key of the entry that holds the kernels for this machine and these sources."""
    return hashlib.sha256(b"k31-kernels\0" + build.build_key(_VARIANT).encode()).hexdigest()


def offer_kernels(store: EntryStore) -> bool:
    """Serve with the kernels of a store where this machine has built none; tell whether that was done."""
    if os.environ.get(loader.SWITCH) == "0" or build.kept_at(_VARIANT).exists():
        return False
    entry = store.find(kernels_key())
    if entry is None:
        return False
    try:
        loader.adopt(entry.path(_FILE), _VARIANT)
    except BuildError as error:
        warnings.warn(f"k31compile: the kernels in {store.root} are not used: {error}", stacklevel=2)
        return False
    return True


def keep_kernels(store: EntryStore) -> bool:
    """Put the kernels that were built here into a store that has none for this machine; tell whether that was done."""
    if not build.kept_at(_VARIANT).exists() or store.find(kernels_key()) is not None:
        return False
    path = build.built_library(_VARIANT)  # checked once more: what is shared is what was built
    ingredients = {"built from": build.build_key(_VARIANT)}
    return store.publish(kernels_key(), "kernels", ingredients, {}, {}, {_FILE: path}) is not None
