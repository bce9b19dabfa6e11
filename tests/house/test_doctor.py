"""``k31 doctor`` on broken machines: no torch, a vendor package that breaks torch, no compiler, an open cache."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from k31compile.cli import doctor as doctor_module
from k31compile.kernels.cpu import build

BLOCK_TORCH = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'")

sys.meta_path.insert(0, Block())
"""


def doctor(tmp_path: Path, **changes: str) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
    """Run the command in an environment of its own; return exit code, JSON and checks by name."""
    env = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    env |= {"K31_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path), **changes}
    done = subprocess.run(
        [sys.executable, "-m", "k31compile", "doctor", "--json"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    data = json.loads(done.stdout)
    return done.returncode, data, {check["name"]: check for check in data["checks"]}


def test_it_runs_without_torch_without_a_compiler_and_with_an_open_cache(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK_TORCH)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    code, data, checks = doctor(tmp_path, CXX="no-such-compiler -x")
    assert code == 1
    assert data["ok"] is False
    assert checks["import torch"]["status"] == "fail"
    assert "No module named 'torch'" in checks["import torch"]["detail"]
    assert "pip install" in checks["import torch"]["remedy"]
    assert checks["compiler"]["status"] == "warn"
    assert "no no-such-compiler" in checks["compiler"]["detail"]
    assert "codegen='ops'" in checks["compiler"]["remedy"]
    assert checks["cache folder"]["status"] == "fail"
    assert "chmod go-w" in checks["cache folder"]["remedy"]


def test_it_names_the_remedy_where_torch_npu_breaks_torch(tmp_path: Path) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open')\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    for cann in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"):
        assert cann not in os.environ
    code, data, checks = doctor(tmp_path)
    assert code == 0, "k31 itself works there"
    assert data["ok"] is True
    for name in ("import torch", "torch-npu"):
        assert checks[name]["status"] == "warn"
        assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in checks[name]["remedy"]
    assert "libhccl.so" in checks["import torch"]["detail"]
    assert "without CANN" in checks["torch-npu"]["detail"]
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("doctor-")]


def test_it_says_which_instructions_the_kernels_are_held_to(tmp_path: Path) -> None:
    _, _, checks = doctor(tmp_path, K31_CPU_ISA="portable")
    assert checks["cpu"]["status"] == "ok"
    assert "kernels are built with K31_CPU_ISA=portable" in checks["cpu"]["detail"]
    code, _, checks = doctor(tmp_path, K31_CPU_ISA="avx1024")
    assert (code, checks["cpu"]["status"]) == (1, "fail")
    assert "K31_CPU_ISA does not take 'avx1024'" in checks["cpu"]["detail"]
    assert checks["cpu"]["remedy"] == "it takes native, avx2, portable"


def test_its_probe_is_built_as_the_kernels_are() -> None:
    assert build.UNIT_FLAGS == doctor_module._FLAGS
