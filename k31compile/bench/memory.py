"""How much memory a call needs beyond what was there and what it returns, by the kernel's own books."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_extra_bytes(call: Callable[[], Any]) -> int | None:
    """Growth of the resident peak over one call beyond its results; None where the kernel does not tell.

    Free memory of the heap goes back before, so that a temporary is seen although the heap would have had room for it.
    The call runs in a thread of its own, which has none of the scratch that our kernels keep for each thread.
    """
    results: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                results.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _RESET.write_text("5")
        before = _kilobytes("VmRSS")
    except (OSError, AttributeError, StopIteration):
        return None
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return max(0, (_kilobytes("VmHWM") - before) * 1024 - _bytes_of(results))


def resident_peak() -> int | None:
    """The resident peak of this process until now, in bytes; None where the kernel does not tell."""
    try:
        return _kilobytes("VmHWM") * 1024
    except (OSError, StopIteration):
        return None


def _bytes_of(results: Any) -> int:
    storages = {
        leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
        for leaf in pytree.tree_leaves(results)
        if isinstance(leaf, torch.Tensor)
    }
    return sum(storages.values())


def _kilobytes(field: str) -> int:
    return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(field))
