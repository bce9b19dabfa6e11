"""No implementation on the CPU builds the large tensors that the plain form builds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k31compile.kernels.cpu import loader

ROOT = Path(__file__).parents[2]
MEASURE = """
import sys, torch, k31compile.kernels
from pathlib import Path

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

def indexer(rows):
    tensors = torch.randn(1, rows, 16, 32), torch.randn(1, rows, 1, 32), torch.randn(1, rows, 16)
    return lambda: torch.ops.k31.lightning_indexer(*tensors, sparse_count=64)

def attention(rows):
    query, cache = torch.randn(1, rows, 4, 576), torch.randn(1, 2048, 1, 576)
    index = torch.randint(0, 2048, (1, rows, 1, 512), dtype=torch.int32)
    return lambda: torch.ops.k31.sparse_flash_attention(
        query[..., :512], cache[..., :512], cache[..., :512], index, 0.1,
        query_rope=query[..., 512:], key_rope=cache[..., 512:], sparse_mode=0,
    )

def delta(rows):
    case = [torch.randn(1, rows, 4, 128) for _ in range(3)] + [-torch.rand(1, rows, 4, 128), torch.rand(1, rows, 4)]
    return lambda: torch.ops.k31.kda_chunk(*case)

def experts(rows):
    x, index, weights = torch.randn(rows, 64), torch.randint(0, 16, (rows, 8)), torch.rand(rows, 8)
    gate, up, down = torch.randn(16, 256, 64), torch.randn(16, 256, 64), torch.randn(16, 64, 256)
    return lambda: torch.ops.k31.grouped_experts(x, index, weights, [gate], [up], [down])

def conv(rows):
    x, weight = torch.randn(1, 512, rows).transpose(1, 2), torch.randn(512, 4)
    return lambda: torch.ops.k31.short_conv(x, weight)

def norm(rows):
    x, weight = torch.randn(rows, 512), torch.ones(512)
    return lambda: torch.ops.k31.gated_rms_norm(x, x, weight, eps=1e-5)

def prepare(rows):
    bank, queries = torch.randn(8, rows, 1024).transpose(0, 1), torch.randn(5, 1024)
    return lambda: torch.ops.k31.attn_res_prepare(bank, queries, eps=1e-5)

def weigh(rows):
    banks, queries = [torch.randn(rows, 2, 1024).bfloat16() for _ in range(4)], torch.randn(5, 1024)
    return lambda: torch.ops.k31.attn_res_prepare(banks[0], queries, eps=1e-5, more=banks[1:], mix=False)

def mix(rows):
    banks, weights = [torch.randn(rows, 1, 1024).bfloat16() for _ in range(3)], torch.rand(rows, 3)
    x, ones = torch.randn(rows, 1024).bfloat16(), torch.ones(rows)
    return lambda: torch.ops.k31.attn_res_update(x, x, ones, ones, weights, x[0], eps=1e-5, bank=banks)

def update(rows):
    x, ones = torch.randn(rows, 1024), torch.ones(rows)
    return lambda: torch.ops.k31.attn_res_update(x, x, ones, ones, x, x[0], eps=1e-5, norm_weight=x[1])

torch.set_num_threads(2)
make, rows = globals()[sys.argv[1]], int(sys.argv[2])
make(8)()
call = make(rows)
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
result = call()
results = result if isinstance(result, tuple) else (result,)
print((kilobytes("VmHWM") - before) * 1024 - sum(x.nbytes for x in results))
"""


def extra_bytes(operator, rows, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-c", MEASURE, operator, str(rows)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    if "clear_refs" in run.stderr:
        pytest.skip("this system does not count a process's peak")
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.parametrize(
    ("operator", "rows", "plain"),
    [
        ("indexer", 2048, 2048 * 2048 * 16 * 4),
        ("attention", 128, 128 * 512 * 576 * 4),
        ("delta", 8192, 8192 * 4 * 16 * 128 * 4),
        ("experts", 12288, 12288 * 8 * 256 * 4),
        ("conv", 65536, 65536 * 512 * 4),
        ("norm", 65536, 65536 * 512 * 4),
        ("prepare", 4096, 4096 * 8 * 1024 * 4),
        ("weigh", 8192, 8192 * 5 * 1024 * 4),
        ("mix", 32768, 32768 * 1024 * 4),
        ("update", 32768, 32768 * 1024 * 4),
    ],
)
def test_kernels_need_scratch_per_thread_only(operator, rows, plain):
    usable, why = loader.available()
    if not usable:
        pytest.skip(why)
    assert extra_bytes(operator, rows) < 4 << 20 < plain / 16


@pytest.mark.parametrize(
    ("operator", "rows", "plain"),
    [
        ("indexer", 2048, 2048 * 2048 * 16 * 4),
        ("attention", 512, 512 * 512 * 576 * 4),
        ("delta", 4096, 4096 * 4 * 16 * 128 * 4),
        ("experts", 12288, 12288 * 8 * 256 * 4),
    ],
)
def test_references_work_in_blocks(operator, rows, plain):
    assert extra_bytes(operator, rows, K31_CPU_KERNELS="0") < plain / 2
