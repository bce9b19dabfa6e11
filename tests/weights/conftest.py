"""Checkpoints with everything odd in them: dtypes, sizes, ranks, names."""

import json

import pytest
import torch
from safetensors.torch import save_file


def bits(shape, dtype, seed=0):
    """Any bits, NaN among them, seen as a dtype."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    count = 1
    for side in shape:
        count *= side
    drawn = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def odd_tensors():
    """First shard and second shard."""
    first = {
        "embed_tokens.weight": bits((64, 32), torch.bfloat16, 1),
        "layers.0.q.weight": bits((64, 32), torch.bfloat16, 2),
        "layers.0.odd.weight": bits((33, 17), torch.bfloat16, 3),
        "layers.0.one.weight": bits((1, 64), torch.bfloat16, 4),
        "layers.0.half.weight": bits((32, 48), torch.float16, 5),
        "layers.0.norm.weight": bits((32, 32), torch.bfloat16, 6),
        "layers.0.bias": bits((32,), torch.bfloat16, 7),
        "layers.0.experts": bits((3, 32, 64), torch.bfloat16, 8),
    }
    second = {
        "layers.1.int.weight": bits((64, 64), torch.int8, 9),
        "layers.1.fp8.weight": bits((64, 32), torch.float8_e4m3fn, 10),
        "layers.1.fp32.weight": bits((32, 32), torch.float32, 11),
        "layers.1.empty": torch.empty(0, 16, dtype=torch.bfloat16),
        "layers.1.scalar": torch.tensor(1.5, dtype=torch.float64),
        "layers.1.mask": torch.tensor([True, False]),
        "Gewicht µ/[0]": bits((16, 16), torch.bfloat16, 12),
        "layers.1.scale": bits((4, 4), torch.float8_e8m0fnu, 13),
    }
    return first, second


@pytest.fixture
def checkpoint(tmp_path):
    """A folder of two shards, an index and a configuration."""
    folder = tmp_path / "source"
    folder.mkdir()
    weight_map = {}
    for number, tensors in enumerate(odd_tensors(), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(t.nbytes for tensors in odd_tensors() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text('{"hidden": 32}\n')
    return folder


def files_of(folder):
    """Everything in a folder, hidden files too: name -> bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
