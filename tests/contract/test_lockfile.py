"""The file: what is written is read, the same facts give the same text, and every other file is refused in one line."""

import tomllib
from pathlib import Path

import pytest

from k31compile.contract.lockfile import Contract, Graph, read_contract, write_contract
from k31compile.errors import LockError

BYTES = {"weights": 3, "inputs": 2, "peak": 1}
FIRST = Graph("a:prefill", 1, ("float32[2, ?]", "int64[1]"), {"": {"static_top_k": 1}, 'l["0"].x': {}}, {}, BYTES)
SECOND = Graph("a:decode", 2, (), {}, {"short_conv": 3}, {**BYTES, "peak": 0})
CONTRACT = Contract('my "odd" file.py:entry', (FIRST, SECOND), {"torch": "2.13.0"})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "k31.lock"
    write_contract(path, CONTRACT)
    text = path.read_text()
    assert read_contract(path) == CONTRACT
    assert read_contract(path).entries() == ["a:prefill", "a:decode"]
    write_contract(path, read_contract(path))
    assert path.read_text() == text
    assert "renew it:  k31 explain" in text
    assert path.stat().st_mode & 0o777 == 0o644


def test_one_changed_layer_is_one_changed_line(tmp_path: Path) -> None:
    layers = {f"layers.{i}": {"kda_chunk": 1} for i in range(20)}
    texts = []
    for name, last in (("one", 1), ("two", 2)):
        write_contract(
            tmp_path / "k31.lock",
            Contract("m:f", (Graph("m", 1, (), {**layers, "z": {"kda_chunk": last}}, {}, BYTES),)),
        )
        texts.append((tmp_path / "k31.lock").read_text().splitlines())
        assert name
    assert sum(a != b for a, b in zip(*texts, strict=True)) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "there is no fusion contract"),
        ("= [", "the contract is damaged: Invalid"),
        ("\xff\xfe", "the contract is damaged: "),
        ("", "this is no fusion contract"),
        ('[package]\nname = "x"\n', "this is no fusion contract"),
        ("format = 2\ngraph = []\n", "the contract has format 2, this version reads 1"),
        ("format = 1\ngraph = []\n", "the contract is damaged: KeyError 'target'"),
        ("format = 1\ntarget = 'x'\nversions = {}\ngraph = [3]\n", "the contract is damaged: TypeError"),
    ],
)
def test_every_other_file_is_refused_in_one_line(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "k31.lock"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LockError) as caught:
        read_contract(path)
    message = str(caught.value)
    assert says in message
    assert str(path) in message
    assert message.startswith("K31-0603: ")
    assert "k31 explain TARGET --lock F" in message
    assert "\n" not in message


def test_a_count_that_is_no_number_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "k31.lock"
    write_contract(path, CONTRACT)
    for old, new in (("static_top_k = 1", "static_top_k = true"), ("peak = 0", 'peak = "0"'), ("number = 2", "")):
        broken = path.read_text().replace(old, new)
        assert broken != path.read_text()
        assert tomllib.loads(broken)
        (tmp_path / "broken").write_text(broken)
        with pytest.raises(LockError, match="the contract is damaged"):
            read_contract(tmp_path / "broken")


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "poetry.lock"
    path.write_text("# somebody else's\n")
    with pytest.raises(LockError, match="is left as it is"):
        write_contract(path, CONTRACT)
    assert path.read_text() == "# somebody else's\n"
    with pytest.raises(LockError, match="cannot be written: No such file"):
        write_contract(tmp_path / "nowhere" / "k31.lock", CONTRACT)
