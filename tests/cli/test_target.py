"""TARGET: every wrong one is one line that says what to do, with exit code 2."""

from collections.abc import Callable

import pytest

from k31compile.cli import entries, target
from k31compile.errors import K31Error

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tyni", "K31-0103: there is no target 'tyni'; did you mean 'tiny'?"),
        ("tiny:decod", "did you mean 'tiny:decode'?"),
        ("nowhere.at_all:factory", "no module 'nowhere.at_all' can be imported from here"),
        ("absent.py:factory", "K31-0103: there is no file absent.py"),
        ("absent.py", "absent.py names no factory; write absent.py:factory"),
        ("json:loadz", "json has no 'loadz'; did you mean 'load"),
        ("{small}:entri", "did you mean 'entr"),
        (
            "{small}:model_alone",
            "K31-0104: {small}:model_alone returned the model alone (Small), which does not say how",
        ),
        (
            "{small}:with_arguments",
            "returned a tuple (Small, tuple), not an Entry or a list of them; write def factory",
        ),
        ("{small}:nothing", "returned an empty list"),
        ("{small}:number", "returned a int, not an Entry"),
        ("{small}:not_callable", "is a int, not a function"),
        ("{small}:crash", "{small}:crash failed: ValueError: no weights"),
    ],
)
def test_a_wrong_target_is_one_line_and_2(name: str, says: str, small: str, k31: Run) -> None:
    code, out, err = k31("explain", name.format(small=small))
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("K31-")]
    assert len(lines) == 1
    assert says.format(small=small) in lines[0]


def test_a_module_is_found_where_one_stands(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.rpartition("/")[0])
    (entry,) = target.load_entries("small_model:entries")
    assert entry.name == "small"


def test_a_dtype_is_given_to_model_and_arguments(small: str) -> None:
    (entry,) = target.load_entries(f"{small}:entry", dtype="bf16")
    assert {str(entry.args[0].dtype), str(entry.call().dtype)} == {"torch.bfloat16"}
    with pytest.raises(K31Error, match="no dtype 'int4'"):
        target.load_entries(f"{small}:entry", dtype="int4")


def test_shipped_entries_can_be_called() -> None:
    prefill, decode = target.load_entries("tiny")
    assert [prefill.name, decode.name] == ["tiny:prefill", "tiny:decode"]
    assert prefill.call().shape == (1, entries.SHIPPED["tiny"].chunk, 256)
    (only,) = target.load_entries("tiny:decode", dtype="bf16")
    assert only.call().isfinite().all()


def test_full_is_on_the_meta_device_with_as_many_layers_as_asked_for() -> None:
    (entry,) = target.load_entries("full:decode", layers=5)
    assert entry.model.config.full_attention_layers == (4,)
    assert entry.model.lm_head.weight.device.type == "meta"
    with pytest.raises(K31Error, match="1 to 93 layers"):
        target.load_entries("full", layers=94)
    with pytest.raises(K31Error, match="for shipped entries"):
        target.load_entries("json:loads", layers=2)
