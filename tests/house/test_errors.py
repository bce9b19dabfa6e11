"""Errors: one line, a code of their own, a remedy, and a way through a worker process."""

import pickle

import pytest

from k31compile.errors import K31Error, OptionError, UsageError, all_errors, explain_code


def test_the_text_is_one_line_of_what_where_and_remedy() -> None:
    error = OptionError("no such\n  thing", where="model.py:3", hint="write it")
    assert str(error) == "K31-0101: no such thing (model.py:3); write it"
    assert error.to_dict()["where"] == "model.py:3"
    assert str(OptionError("x")).startswith("K31-0101: x; see ")


def test_codes_are_unique_and_explained() -> None:
    classes = list(all_errors())
    codes = [cls.code for cls in classes]
    assert len(set(codes)) == len(codes) >= 15
    for cls in classes:
        assert cls.__name__ in explain_code(cls.code)
        assert cls.exit_code in (1, 2)
    assert explain_code("301") == explain_code("k31-0301")
    with pytest.raises(UsageError, match="no error code '9999'"):
        explain_code("9999")


@pytest.mark.parametrize("cls", list(all_errors()), ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling(cls: type[K31Error]) -> None:
    error = pickle.loads(pickle.dumps(cls("what", "where", "hint")))
    assert type(error) is cls
    assert str(error) == f"{cls.code}: what (where); hint"
