"""The entries that ship with the command: K3.1 models of several sizes, a padded prefill chunk and one decode step.

Nothing here imports torch before an entry is built, so names can be listed and completed at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import k31compile
from k31compile.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from k31compile.entry import Entry
    from k31compile.model import Caches, K31Config, K31ForCausalLM

PARTS = ("prefill", "decode")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Shipped:
    """How an entry of this name is called: tokens of one prefill chunk, and tokens that stand before it."""

    chunk: int
    history: int


SHIPPED = {
    "pico": Shipped(chunk=48, history=144),
    "tiny": Shipped(chunk=48, history=80),
    "mini": Shipped(chunk=48, history=272),
    "full": Shipped(chunk=16, history=4080),
}
"""Names of shipped entries, each also as NAME:prefill and NAME:decode."""

DEFAULT_DEPTH = {"full": 4}
"""How many layers of a model are built unless --layers says otherwise; all where it is not named here."""

PROMPT = '''def fibonacci(n):
    """Return the first n Fibonacci numbers."""
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]


def main():
'''
"""What the demo continues, and what stands before and in the calls of `pico`."""

PICO = Path(k31compile.__file__).parents[1] / "examples" / "pico"


def shipped_names() -> list[str]:
    """Every name that stands for a shipped entry."""
    return [*SHIPPED, *(f"{name}:{part}" for name in SHIPPED for part in PARTS)]


def shipped_entries(name: str, part: str = "", dtype: str = "fp32", layers: int | None = None) -> list[Entry]:
    """Build the entries of a shipped name: both parts, or the one that is named.

    Weights and the history in the caches come from a seed, except those of `pico`, which is trained and reads text.
    `full` stands on the meta device and is built with `layers` layers.

    Raises:
        CheckpointError: `pico`, and its checkpoint is missing or damaged.
        UsageError: more layers than the model has, or fewer than all of `pico`.
    """
    model, config = build_model(name, dtype, layers)
    parts = [part] if part else list(PARTS)
    return [_entry(name, each, model, config, dtype) for each in parts]


def pico_is_here() -> bool:
    """Whether the trained checkpoint is there: it is in the source tree, not in a wheel."""
    return (PICO / "config.json").is_file()


def build_model(name: str, dtype: str = "fp32", layers: int | None = None) -> tuple[K31ForCausalLM, K31Config]:
    """Build a shipped model; errors as for `shipped_entries`."""
    import torch

    from k31compile.model import CONFIGS, K31ForCausalLM

    if name == "pico":
        if layers is not None:
            raise UsageError("--layers is not for pico: it was trained as a whole")
        trained = _load_pico(getattr(torch, DTYPES[dtype]))
        return trained, trained.config
    config = shallower(CONFIGS[name](), layers if layers is not None else DEFAULT_DEPTH.get(name))
    with torch.device("meta" if name == "full" else "cpu"):
        model = K31ForCausalLM(config)
    return model.to_serving_dtype(getattr(torch, DTYPES[dtype])).eval(), config


def _load_pico(dtype: torch.dtype) -> K31ForCausalLM:
    from k31compile.model import ModelError, load_model

    if not pico_is_here():
        raise CheckpointError(
            "pico is not here", str(PICO), hint="it is in the source tree only; 'tiny' needs no files"
        )
    try:
        return load_model(PICO, dtype).eval()
    except ModelError as cause:
        raise CheckpointError(f"pico cannot be loaded: {cause}") from cause


def shallower(config: K31Config, layers: int | None) -> K31Config:
    """Return the config with its first `layers` layers; None leaves it as it is."""
    if layers is None:
        return config
    if not 1 <= layers <= config.num_hidden_layers:
        raise UsageError(f"--layers {layers}: the model has 1 to {config.num_hidden_layers} layers")
    return config.replace(
        num_hidden_layers=layers,
        full_attention_layers=tuple(layer for layer in config.full_attention_layers if layer <= layers),
        first_k_dense_replace=min(config.first_k_dense_replace, layers),
    )


def _entry(name: str, part: str, model: K31ForCausalLM, config: K31Config, dtype: str) -> Entry:
    import torch

    from k31compile.entry import Entry
    from k31compile.model import Caches

    sizes = SHIPPED[name]
    device = model.lm_head.weight.device
    weight_dtype = getattr(torch, DTYPES[dtype])
    caches = Caches.allocate(config, 1, sizes.history + sizes.chunk, dtype=weight_dtype, device=device)
    length = sizes.chunk if part == "prefill" else 1
    if name == "pico":
        tokens = _read_prompt(model, caches, sizes.history)[:, :length]
    else:
        _fill(caches)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, config.vocab_size, (1, length), generator=generator).to(device)
    start = torch.tensor([sizes.history], device=device)
    # a prefill chunk ends in padding, as the last chunk of a prompt does
    lengths = (torch.tensor([length - 5], device=device),) if part == "prefill" else ()
    return Entry(f"{name}:{part}", model, (tokens, caches, start, *lengths))


def _read_prompt(model: K31ForCausalLM, caches: Caches, history: int) -> Tensor:
    """Let the model read the first `history` bytes of the prompt; return those that follow, int64 [1, rest]."""
    import torch

    from k31compile.model import prefill

    text = list(PROMPT.encode())
    prefill(model, caches, [text[:history]])
    return torch.tensor([text[history:]])


def _fill(caches: Caches) -> None:
    """Give the caches a history: seeded values of the size that the model's norms give its own."""
    import torch

    generator = torch.Generator().manual_seed(2)
    for cache in caches.layers:
        for tensor in cache:
            if tensor is not None and tensor.device.type != "meta":
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
