"""Artefacts of small models, made once; a folder of its own for keys and what is unpacked."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # toy_entries


@pytest.fixture(scope="session")
def user_folder(tmp_path_factory) -> Path:
    """The user's cache folder of all these tests; it is in the environment while one of them runs, and no longer."""
    return tmp_path_factory.mktemp("user")


@pytest.fixture(autouse=True)
def own_cache(user_folder, monkeypatch) -> Path:
    """That folder, with a key file of its own."""
    return set_cache(user_folder, monkeypatch)


def set_cache(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    patch.setenv("K31_CACHE_DIR", str(folder))
    patch.delenv("K31_CACHE_KEY", raising=False)
    return folder


@pytest.fixture(scope="session")
def made(user_folder, tmp_path_factory) -> SimpleNamespace:
    """Two artefacts, what was told of each, and the models as they were."""
    import copy

    import toy_entries

    from k31compile.ahead import make_artefact

    folder = tmp_path_factory.mktemp("made")
    entries = {"rich": toy_entries.rich(), "many": toy_entries.many()}
    before = {name: copy.deepcopy(entry.model) for name, entry in entries.items()}
    with pytest.MonkeyPatch.context() as patch:
        set_cache(user_folder, patch)
        told = {name: make_artefact([entry], folder / f"{name}.k31") for name, entry in entries.items()}
    files = {name: folder / f"{name}.k31" for name in entries}
    return SimpleNamespace(folder=folder, entries=entries, models=before, told=told, files=files)


@pytest.fixture
def rich(made):
    """The artefact of `Rich`, loaded afresh."""
    from k31compile import load

    return load(made.files["rich"])


@pytest.fixture
def many(made):
    """The artefact of `Many`, loaded afresh."""
    from k31compile import load

    return load(made.files["many"])
