"""A function of a library is in a key by the one name that leads to it; a name that is only borrowed does not count."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from key_cases import differing, draw, key_of
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, max_pool2d, silu

from k31compile.cache import surroundings
from k31compile.cache.canonical import _function
from k31compile.cache.entry_store import EntryStore
from k31compile.cache.key import Key
from k31compile.errors import KeyingError
from k31compile.keeping import Keeping, _digest
from k31compile.report import Report


def test_functions_that_a_factory_made_have_their_own_names() -> None:
    """torch calls each of its pooling functions `boolean_dispatch.<locals>.fn`."""
    images = draw(1, 1, 9, 9)
    largest, adaptive = (key_of(lambda x, pool=pool: pool(x, 3), images) for pool in (max_pool2d, adaptive_max_pool2d))
    assert differing(largest, adaptive) == {"graph"}


def test_a_function_under_the_name_of_one_of_torch() -> None:
    """A wrapper has the name of what it wraps, and does what it likes."""

    @torch.compiler.allow_in_graph
    @functools.wraps(silu)
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    assert differing(key_of(lambda x: silu(x), draw(3)), key_of(lambda x: tripled(x), draw(3))) == {"graph"}


def test_a_helper_of_an_opaque_function_is_not_known_by_the_name_that_a_factory_gave() -> None:
    digests = {_digest(_reading(pool)) for pool in (max_pool2d, adaptive_max_pool2d)}
    assert len(digests) == 2


def _reading(pool: Callable[..., Any]) -> Any:
    """A function whose global `pool` is this one."""
    scope: dict[str, Any] = {"pool": pool, "__name__": "somebodys"}
    exec("def read(x):\n    return pool(x, 3)", scope)
    return scope["read"]


def test_an_object_that_is_called_has_no_key() -> None:
    with pytest.raises(KeyingError, match="calls a partial"):
        _function(functools.partial(silu, inplace=False), _digest)


def test_nothing_is_kept_once_our_own_files_have_changed(tmp_path, monkeypatch):
    assert not surroundings.have_sources_changed()
    (tmp_path / "other.py").write_text("VALUE = 1")
    monkeypatch.setattr(surroundings, "_ROOT", tmp_path)
    assert surroundings.have_sources_changed()
    store, report = EntryStore(tmp_path / "store"), Report(cache={"why": "missed"})
    keeping = Keeping(store, Key({"graph": "a"}), (), is_warm_required=False)
    keeping.keep(tmp_path, {}, "", report)
    assert "not kept: files of k31compile have changed since this process began" in report.cache["why"]
    assert store.listed() == []
