"""An ONNX model on disk: checked by onnx before it is there, weights beside it where they are large."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from k31compile.errors import TargetError, UsageError
from k31compile.onnx_export.export import OnnxGraph

SUFFIX = ".onnx"
EXTERNAL_ABOVE = 1 << 30
"""Bytes of weights above which they are a file of their own, NAME.onnx.data: one protobuf holds 2 GB at most."""


def require_place(path: Path) -> None:
    """Raise UsageError unless a model can be written to this path."""
    if path.suffix != SUFFIX:
        raise UsageError(f"{path} does not end in {SUFFIX}", hint=f"write -o {path.with_suffix(SUFFIX)}")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder} for {path}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the folder {folder} cannot be written")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="give -o a file")


def write_model(graph: OnnxGraph, path: Path, external_above: int = EXTERNAL_ABOVE) -> list[Path]:
    """Write a model and return its files; nothing is there unless onnx's checker takes it with all its types.

    Raises:
        TargetError: the checker objects, with what it says.
    """
    import onnx
    import onnx_ir as ir

    beside = f"{path.name}.data" if graph.weight_bytes() > external_above else None
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=f".{path.name}.") as folder:
        draft = Path(folder) / path.name
        ir.save(graph.model, draft, external_data=beside)
        try:
            onnx.checker.check_model(str(draft), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            what = str(error).strip().splitlines()[0]
            hint = "--dtype fp32 helps where ONNX has an operator for some dtypes only"
            raise TargetError(f"onnx's checker does not take the model: {what}", graph.name, hint) from error
        names = [beside, path.name] if beside else [path.name]
        for name in names:
            os.replace(Path(folder) / name, path.parent / name)
    return [path.parent / name for name in reversed(names)]
