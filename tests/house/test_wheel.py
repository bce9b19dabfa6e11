"""The wheel: built, installed into a fresh venv, used from another folder; one top-level name, no other."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = """
import json, k31compile, torch._dynamo
print(json.dumps([k31compile.__file__, torch._dynamo.list_backends()]))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of the tree: a build in place would leave folders there and take up old ones."""
    tree = tmp_path_factory.mktemp("tree")
    for item in ("pyproject.toml", "README.md"):
        if (ROOT / item).exists():
            shutil.copy(ROOT / item, tree)
    shutil.copytree(ROOT / "k31compile", tree / "k31compile", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for link in ("passes", "kernels", "model", "cache"):
        (tree / link).symlink_to(f"k31compile/{link}")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tree / "dist", cwd=tree)
    (built,) = (tree / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_our_package_whole_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"k31compile"}
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "k31compile").rglob("*")
        if path.suffix in {".py", ".cpp", ".h", ".json", ".typed"} and path.is_file()
    }
    assert wanted <= set(names)


def test_an_installed_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    # torch and the rest come from this environment: a path in a .pth file brings no editable install with it
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where, backends = json.loads(run(python, "-c", PROBE, cwd=tmp_path).splitlines()[-1])
    assert Path(where).is_relative_to(site)
    assert "k31" in backends
    assert run(tmp_path / "venv" / "bin" / "k31", "--version", cwd=tmp_path).startswith("k31compile ")
