"""Weights on disk: sharded safetensors with an index that holds each tensor's hash; loading is strict."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from k31compile.model.config_file import load_config, read_json, save_config, write_json
from k31compile.model.errors import WeightsError
from k31compile.model.k31 import K31ForCausalLM

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_FLOATING = ("F64", "F32", "F16", "BF16")
_SHOWN = 8
_LAYOUT_RECORD = "k31.layout"  # in the metadata of a file whose tensors are not stored row by row


def save_weights(model: nn.Module, folder: str | Path, max_shard_bytes: int = 4 * 2**30) -> None:
    """Write all parameters as model-0000i-of-0000n.safetensors, then the index, then config.json.

    The index also holds the SHA-256 of every tensor's bytes, under metadata, where other loaders pass it by.

    A tensor larger than `max_shard_bytes` gets a shard of its own. Each file appears whole or not at all, the
    index after the shards; shards of an earlier save that the index no longer names are removed last.
    """
    folder = Path(folder)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if any(tensor.device.type == "meta" for tensor in tensors.values()):
        raise WeightsError(f"cannot save to {folder}: the model is on the meta device and has no values")
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(tensors, max_shard_bytes))
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        partial = folder / f".{file}.{os.getpid()}"
        save_file({name: tensors[name].cpu().contiguous() for name in shard}, partial, {"format": "pt"})
        partial.replace(folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    metadata = {"total_size": total, "sha256": {name: _digest(tensor) for name, tensor in tensors.items()}}
    write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})
    if isinstance(model, K31ForCausalLM):
        save_config(model.config, folder)
    for old in folder.glob("model-*-of-*.safetensors"):
        if old.name not in weight_map.values():
            old.unlink()


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Copy the weights in `folder` into the parameters, converting between floating dtypes.

    Everything is checked first. A tensor that is missing, unknown, misshapen, not floating or not the one whose
    hash the index holds, and a file that is missing, truncated or foreign, raise one WeightsError that names them,
    and the model stays as it was.
    """
    folder = Path(folder)
    targets = dict(model.state_dict())
    if any(tensor.device.type == "meta" for tensor in targets.values()):
        raise WeightsError(f"cannot load {folder}: the model is on the meta device, use model.to_empty first")
    files, digests = _tensors_by_file(folder)
    problems = _check_names(set(targets), {name for names in files.values() for name in names}, folder)
    for file, names in files.items():
        problems += _check_file(folder / file, names, targets, digests)
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        lines = "\n  ".join([*problems[:_SHOWN], *more])
        raise WeightsError(f"weights in {folder} do not fit the model, nothing was loaded:\n  {lines}")
    with torch.no_grad():
        for file, names in files.items():
            with safe_open(folder / file, framework="pt") as opened:
                for name in names:
                    targets[name].copy_(opened.get_tensor(name))


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32) -> K31ForCausalLM:
    """Build the model that config.json describes, in serving dtype, and load its weights."""
    with torch.device("meta"):
        model = K31ForCausalLM(load_config(folder)).to_serving_dtype(dtype)
    model.to_empty(device="cpu")
    load_weights(model, folder)
    model.weights_source = str(Path(folder).resolve())
    return model


def _shards(tensors: dict[str, Tensor], limit: int) -> Iterator[list[str]]:
    """Names in order, cut before the sum of their bytes exceeds the limit."""
    shard: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensor.nbytes
    yield shard


def _digest(tensor: Tensor) -> str:
    """SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _tensors_by_file(folder: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """File name -> tensor names, and tensor name -> SHA-256 where the index holds any.

    From the index, or from model.safetensors where there is none.
    """
    if not (folder / INDEX_FILE).exists() and (folder / SINGLE_FILE).exists():
        try:
            with safe_open(folder / SINGLE_FILE, framework="pt") as opened:
                return {SINGLE_FILE: list(opened.keys())}, {}
        except (SafetensorError, OSError) as cause:
            raise WeightsError(f"{folder / SINGLE_FILE} is truncated or no safetensors file: {cause}") from None
    index = read_json(folder / INDEX_FILE, WeightsError)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightsError(f"{folder / INDEX_FILE} has no weight_map from tensor names to file names")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        # A file name with a path in it could reach outside the folder.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(f"{folder / INDEX_FILE}: {name} is said to be in {file!r}, no file of this folder")
        files.setdefault(file, []).append(name)
    digests = metadata.get("sha256", {}) if isinstance(metadata, dict) else {}
    if not isinstance(digests, dict):
        raise WeightsError(f"{folder / INDEX_FILE}: metadata.sha256 is no map from tensor names to hashes")
    return files, digests


def _check_names(expected: set[str], found: set[str], folder: Path) -> list[str]:
    missing = [f"{name}: the model needs it, {folder.name} has none" for name in sorted(expected - found)]
    return missing + [f"{name}: {folder.name} has it, the model does not" for name in sorted(found - expected)]


def _check_file(path: Path, names: list[str], targets: dict[str, Tensor], digests: dict[str, str]) -> list[str]:
    """What is wrong with one shard, a sentence each; opening it compares its header with its size."""
    if not path.is_file():
        return [f"{path.name}: the index names it, but it does not exist"]
    problems = []
    try:
        with safe_open(path, framework="pt") as opened:
            if _LAYOUT_RECORD in (opened.metadata() or {}):
                return [f"{path.name}: its weights are stored in blocks; `k31 weights convert --layout nd` undoes that"]
            held = set(opened.keys())
            problems += [f"{name} in {path.name}: not in the index" for name in sorted(held - set(names))]
            for name in names:
                if name not in held:
                    problems.append(f"{name}: the index says {path.name}, which does not hold it")
                elif name in targets:
                    entry = opened.get_slice(name)
                    problems += _check_tensor(name, path.name, entry.get_shape(), entry.get_dtype(), targets[name])
                    if name in digests and _digest(opened.get_tensor(name)) != digests[name]:
                        problems.append(f"{name} in {path.name}: its bytes are not those whose hash the index holds")
    except (SafetensorError, OSError) as cause:
        problems.append(f"{path.name}: truncated or no safetensors file ({cause})")
    return problems


def _check_tensor(name: str, file: str, shape: list[int], dtype: str, target: Tensor) -> list[str]:
    problems = []
    if list(shape) != list(target.shape):
        problems.append(f"{name} in {file}: shape {list(shape)}, the model has {list(target.shape)}")
    if dtype not in _FLOATING:
        problems.append(f"{name} in {file}: dtype {dtype}, expected one of {', '.join(_FLOATING)}")
    return problems
