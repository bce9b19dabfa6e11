"""The stores of this process, by what the option `cache` says."""

from __future__ import annotations

import functools
from pathlib import Path

from k31compile.cache.entry_store import EntryStore, default_store


def open_store(cache: bool | str) -> EntryStore:
    """The store of `cache=True`, or of a folder that is named.

    Raises:
        StoreError: the folder is not this user's own.
    """
    if cache is True:
        return default_store()
    return _at(str(cache))


@functools.lru_cache(maxsize=32)
def _at(place: str) -> EntryStore:
    return EntryStore(Path(place))
