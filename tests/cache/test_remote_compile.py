"""A model compiled on one machine runs on another that has nothing but the URL, the secret, and no compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k31compile.kernels.cpu import build

ROOT = Path(__file__).parents[2]
RUN = """
import json, sys, torch, k31compile

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()
x = torch.randn(3, 8)
compiled = torch.compile(model, backend="k31", options={"cache": sys.argv[1]})
with torch.no_grad():
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
print(json.dumps(k31compile.last_report().cache))
"""


def run(home: Path, url: str, **variables: str) -> tuple[dict, str]:
    home.mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "K31_CACHE_DIR": str(home / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "K31_CACHE_KEY": "a secret of two machines",
        "K31_REMOTE_TIMEOUT": "60",
    }
    command = [sys.executable, "-P", "-c", RUN, url]
    done = subprocess.run(
        command, cwd=home, env=environment | variables, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_the_second_machine_compiles_nothing(tmp_path):
    url = f"file://{tmp_path}/shelf"
    cache, _ = run(tmp_path / "a", url)
    assert cache["hit"] is False
    (tmp_path / "empty").mkdir()
    cache, said = run(tmp_path / "b", url, PATH=str(tmp_path / "empty"), CXX="")
    assert (cache["hit"], cache["level"]) == (True, 1), said
    assert not (tmp_path / "b" / "cache" / "kernels").exists()
