"""The stores of this process, by what the option `cache` says."""

from __future__ import annotations

import functools
from pathlib import Path

from k31compile.cache.entry_store import EntryStore, default_store


def open_store(cache: bool | str) -> EntryStore:
    """The store of `cache=True`, of a folder that is named, or of a URL with this user's own store before it.

    Raises:
        StoreError: the folder is not this user's own, or the URL cannot be one, or K31_CACHE_KEY is not set for it.
    """
    if cache is True:
        return default_store()
    return _remote_at(str(cache)) if "://" in str(cache) else _at(str(cache))


@functools.lru_cache(maxsize=32)
def _at(place: str) -> EntryStore:
    return EntryStore(Path(place))


@functools.lru_cache(maxsize=32)
def _remote_at(url: str) -> EntryStore:
    from k31compile.cache.remote import Remote, TieredStore  # imports fsspec, which most users never need
    from k31compile.cache.shared_kernels import offer_kernels

    store = TieredStore(default_store().root, Remote(url))
    offer_kernels(store)
    return store
