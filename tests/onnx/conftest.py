"""Exported models that several tests look at; each is made once, for an export takes seconds."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import k31compile
from k31compile.cli.entries import shipped_entries


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SimpleNamespace]:
    """exported("decode"): entry, graph, path and fused counts of that part of `tiny`."""
    from k31compile.onnx_export.export import export_entry
    from k31compile.onnx_export.files import write_model

    made: dict[str, SimpleNamespace] = {}

    def get(part: str) -> SimpleNamespace:
        if part not in made:
            (entry,) = shipped_entries("tiny", part)
            graph = export_entry(entry)
            fused = k31compile.last_report().fused
            path: Path = tmp_path_factory.mktemp("onnx") / f"{part}.onnx"
            files = write_model(graph, path)
            made[part] = SimpleNamespace(entry=entry, graph=graph, files=files, path=path, fused=fused)
        return made[part]

    return get
