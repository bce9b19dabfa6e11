"""Options: refused early, with the nearest known name, and never half understood."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from k31compile.errors import NotBuiltYetError, OptionError
from k31compile.options import FUSIONS, PLANNED_FUSIONS, Options


def test_the_defaults_are_those_of_the_interface() -> None:
    assert Options().to_dict() == {
        "target": None,
        "fuse": "all",
        "quant": "none",
        "layout": "auto",
        "streams": "auto",
        "super_kernel": True,
        "cache": True,
        "codegen": "inductor",
        "strict": False,
        "lock": None,
        "guards": "safe",
        "choice": "fused",
        "confirm_bytes": 4 * 2**30,
        "node_budget": 10_000,
        "require_warm": False,
    }
    assert Options.from_mapping(None) == Options.from_mapping({}) == Options()


def test_an_unknown_option_names_the_nearest_and_lists_the_rest() -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_mapping({"codgen": "ops"})
    assert "'codgen'" in str(caught.value)
    assert "did you mean 'codegen'?" in str(caught.value)
    assert all(field.name in str(caught.value) for field in dataclasses.fields(Options))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"codegen": "inducter"}, "did you mean 'inductor'?"),
        ({"quant": "int8"}, "it takes 'none'"),
        ({"streams": True}, "it takes 'auto', 1"),
        ({"streams": 5}, "does not take 5"),
        ({"strict": 1}, "it takes False, True"),
        ({"strict": None}, "it takes False, True"),
        ({"target": "gpu"}, "it takes None, 'cpu'"),
        ({"cache": 3}, "it takes True, False"),
        ({"lock": True}, "it takes the path of a contract"),
        ({"lock": ""}, "it takes the path of a contract"),
        ({"fuse": "lightning_indexer"}, "write fuse=['lightning_indexer']"),
        ({"fuse": None}, "it takes 'all' or a list"),
        ({"fuse": ["lightening_indexer"]}, "did you mean 'lightning_indexer'?"),
    ],
)
def test_a_bad_value_names_field_value_and_what_is_allowed(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_mapping(given)
    (name,) = given
    assert f"option {name!r}" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"target": "cuda"},
        *({"streams": streams} for streams in (2, 3, 4)),
        *({"fuse": [name]} for name in PLANNED_FUSIONS),
        {"quant": "layered"},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_as_such(given: dict[str, Any]) -> None:
    with pytest.raises(NotBuiltYetError, match="is not built yet; "):
        Options.from_mapping(given)


def test_a_child_that_builds_needs_a_cache() -> None:
    with pytest.raises(OptionError, match="codegen='tiered' needs cache=True"):
        Options(codegen="tiered", cache=False)


def test_a_contract_is_named_by_text_or_path() -> None:
    assert Options.from_mapping({"lock": Path("a") / "k31.lock"}) == Options(lock=str(Path("a") / "k31.lock"))


def test_the_guard_filter_of_torch_is_tolerated() -> None:
    assert Options.from_mapping({"guard_filter_fn": print, "codegen": "ops"}) == Options(codegen="ops")


def test_fuse_selects() -> None:
    some = Options.from_mapping({"fuse": ["static_top_k", "lightning_indexer", "static_top_k"]})
    assert some.fuse == ("lightning_indexer", "static_top_k")
    assert [name for name in FUSIONS if some.fuses(name)] == ["lightning_indexer", "static_top_k"]
    assert all(Options().fuses(name) for name in FUSIONS)
    assert not any(Options(fuse=()).fuses(name) for name in FUSIONS)
    # The fusion of somebody's own pass is in no list of ours; "all" means it too.
    assert Options().fuses("my_own_fusion")
    assert not some.fuses("my_own_fusion")


def test_the_hash_follows_the_values() -> None:
    one = Options.from_mapping({"fuse": ["static_top_k", "lightning_indexer"]})
    same = Options.from_mapping({"fuse": ("lightning_indexer", "static_top_k")})
    assert one.stable_hash() == same.stable_hash()
    seen = {Options(**given).stable_hash() for given in ({}, {"codegen": "ops"}, {"strict": True}, {"fuse": ()})}
    assert len(seen) == 4
    # written down, so that a change of the canonical form is seen: it invalidates every cache
    assert Options().stable_hash() == "ef7d113f76ca46ab767f84654fb15d1240d3ba42eeca711b1a3546404688c79e"
