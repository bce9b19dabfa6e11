"""examples/ci: what machine A warmed runs on machine B, which has another home, user and folder, and no compiler."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / "examples" / "ci"
SECRET = "a secret of two machines"


def run(tmp_path: Path, *argv: str, **more: str) -> subprocess.CompletedProcess[str]:
    # The tree that is tested, and none of the kernels of this user's own cache.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("K31_")}
    environment |= {"K31_CACHE_KEY": SECRET, "PYTHON": shlex.join([sys.executable]), **more}
    environment["K31"] = f"{sys.executable} -P -m k31compile"
    return subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=560)


@pytest.mark.slow
def test_what_is_warmed_on_one_machine_runs_on_another_without_a_compiler(tmp_path):
    done = run(tmp_path, str(CI / "two_machines.sh"), str(tmp_path / "both"))
    assert done.returncode == 0, done.stdout + done.stderr
    a, without, b = done.stdout.split("== machine")[1:]
    assert "2 compiled; 2 graphs missed and 0 hit" in a
    assert "2 found; 0 graphs missed and 2 hit" in a
    assert "entries: 2" in a
    assert "kernels: 1" in a
    assert without.strip() == "B, without the secret"
    assert "K31-0501: K31_CACHE_KEY is not set" in done.stderr
    assert "set K31_CACHE_KEY to the same secret of at least 16 characters on both machines" in done.stderr
    assert "entries: 2 new, 0 here already" in b
    assert "kernels: 1 new, 0 here already" in b
    assert "4 calls, 0 eager; 2 graphs for 2 buckets" in b
    assert "machine B compiled nothing" in b
    assert not (tmp_path / "both" / "b" / "compiler-calls").exists()
    homes = [tmp_path / "both" / name / ".cache" / "k31compile" for name in ("a/home", "b/root")]
    keys = [sorted(path.name for path in (home / "graphs" / "entries").iterdir()) for home in homes]
    assert keys[0] == keys[1]
    assert homes[0].joinpath("signing.key").read_bytes() != homes[1].joinpath("signing.key").read_bytes()


def test_the_scripts_and_the_workflow_belong_together():
    workflow = (CI / "warm.yml").read_text()
    assert "./build.sh graphs.k31bundle" in workflow
    image = (CI / "Dockerfile").read_text()
    assert "k31 cache import graphs.k31bundle" in image
    assert "K31_REQUIRE_WARM=1" in image
    assert "cache warm k31.toml" in (CI / "build.sh").read_text()
    for script in CI.glob("*.sh"):
        assert os.access(script, os.X_OK)
        assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
