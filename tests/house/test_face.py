"""The public face: cheap to import, and its functions win over modules of the same name."""

import subprocess
import sys
import types

import pytest

import k31compile


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, k31compile; k31compile.Options(); k31compile.reports(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    for name in ("Entry", "Options", "Report", "last_report", "reports", "load", "equivalent"):
        assert callable(getattr(k31compile, name))
        assert name in dir(k31compile)
    with pytest.raises(AttributeError, match="no attribute 'compyle'"):
        k31compile.compyle  # noqa: B018


def test_a_function_is_not_hidden_by_the_module_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("k31compile.explain")
    module.explain = lambda: "called"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "k31compile.explain", module)
    k31compile.explain = module  # what the import system does with a submodule
    assert k31compile.explain() == "called"
