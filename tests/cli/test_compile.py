"""`k31 compile` where it cannot do its work: one line each, with the remedy."""

import importlib.util
from collections.abc import Callable

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["tiny:decode", "-o", "OUT"], 2, "does not end in .k31; give -o F.k31, or add --offline --target ascend-a3"),
        (["tiny:decode", "-o", "OUT.k31", "--target", "gpu"], 2, "there is no target 'gpu'; targets: cpu"),
        (["tiny", "-o", "OUT.k31", "--entry", "tiny:x"], 2, "no entry 'tiny:x'; entries: tiny:prefill, tiny:decode"),
        (["tiny", "-o", "OUT.k31", "--weights", "OUT"], 2, "does not exist; give a .safetensors file or its folder"),
        (["tiny", "-o", "OUT.k31", "--threads", "0"], 2, "--threads 0 is less than 1"),
        (["tiny:decode", "-o", "OUT", "--offline"], 2, "--offline needs --target; targets: ascend-a3, ascend-950"),
        (["tiny:decode", "--offline", "--target", "ascend-a3", "-o", "FILE"], 2, "is a file; give -o a folder"),
        (["tiny:decode", "--offline", "--target", "ascend-b2", "-o", "OUT"], 2, "there is no Ascend target"),
        (
            ["tiny:decode", "--offline", "--target", "ascend-950", "--mode", "acl", "-o", "OUT"],
            2,
            "there is no mode 'acl'",
        ),
        (
            ["tiny", "--offline", "--target", "ascend-a3", "-o", "OUT", "--streams", "9"],
            2,
            "--streams 9 is more or less than a schedule may use; ask for 1 to 4",
        ),
    ],
)
def test_a_wrong_call_is_told(arguments, code, told, k31: Run, tmp_path):
    (tmp_path / "file").write_text("")
    places = {"OUT": str(tmp_path / "out"), "FILE": str(tmp_path / "file"), "OUT.k31": str(tmp_path / "out.k31")}
    done, _, errors = k31("compile", *(places.get(argument, argument) for argument in arguments))
    assert told in errors
    assert len(errors.strip().splitlines()) == 1
    assert done == code
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.k31").exists()


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_without_torch_npu_the_remedy_is_named(k31: Run, tmp_path):
    code, _, errors = k31("compile", "tiny:decode", "--layers", "2", "--offline", "--target", "ascend-a3",
                          "-o", str(tmp_path / "out"))  # fmt: skip
    assert code == 1
    assert "torch_npu is not installed" in errors
    assert "make .venv-ascend" in errors
