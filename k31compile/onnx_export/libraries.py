"""onnx, onnxscript and onnxruntime: asked for by one line when they are missing, quiet when they are here."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from k31compile.errors import MissingDependencyError

NEEDED = ("onnx", "onnxscript", "onnxruntime")


def require_onnx(needed: tuple[str, ...] = NEEDED) -> None:
    """Raise MissingDependencyError unless all libraries of an export can be imported."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"an export to ONNX needs {', '.join(missing)}", hint='run: pip install "k31compile[onnx]"'
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Run a block of torch's exporter without its warnings: they are about torchvision and its own parts."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
