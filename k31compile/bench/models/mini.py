"""K3.1 at the size `mini`: decode steps behind a history, and prompts, in both dtypes."""

from __future__ import annotations

from functools import partial

import torch

from k31compile.bench.case import Roof
from k31compile.bench.dtypes import short_name
from k31compile.bench.goals import Bound, Goals
from k31compile.bench.growth import indexers
from k31compile.bench.models.case import ModelCase
from k31compile.bench.models.products import weight_products
from k31compile.entry import Entry
from k31compile.model import CONFIGS, Caches, K31Config, K31ForCausalLM

_HISTORIES = (1024, 4096, 16384, 65536)
_PROMPTS = (512, 2048, 8192)
_DTYPES = (torch.float32, torch.bfloat16)


def cases() -> list[ModelCase]:
    """Batches of one and eight behind each history, then the prompts."""
    made = []
    for dtype in _DTYPES:
        for batch in (1, 8):
            for history in _HISTORIES:
                goal = 3.0 if history == 16384 else 1.0
                quick = (dtype, batch, history) == (torch.float32, 1, 4096)
                made.append(_decode(dtype, batch, history, Bound(goal, 1.0), quick))
    for dtype in _DTYPES:
        for length in _PROMPTS:
            label = f"prefill {short_name(dtype)} T={length}"
            held = Goals({"inductor": Bound(3.0)}, extra_bytes=None, memory_ratio=5.0)
            make = partial(prompt, "mini", dtype, length)
            series = f"mini prefill {short_name(dtype)}"
            quick = (dtype, length) == (torch.float32, 512)
            roof = partial(prompt_roof, "mini", dtype, length)
            made.append(ModelCase("mini", label, make, length, held, series, length, quick, roof=roof))
    return made


def _decode(dtype: torch.dtype, batch: int, history: int, bound: Bound, quick: bool) -> ModelCase:
    label = f"decode {short_name(dtype)} B={batch} S={history}"
    held = Goals({"inductor": bound, "max-autotune": Bound(1.0)}, extra_bytes=None)
    make = partial(step, CONFIGS["mini"](), dtype, batch, history)
    series = f"mini decode {short_name(dtype)} B={batch}"
    part = partial(indexers, CONFIGS["mini"](), dtype, batch, history)
    roof = partial(step_roof, CONFIGS["mini"](), dtype, batch, history)
    return ModelCase("mini", label, make, batch, held, series, history, quick, part=part, roof=roof)


def step(config: K31Config, dtype: torch.dtype, batch: int, history: int) -> Entry:
    """One token for each request behind `history` others, whose caches hold random numbers."""
    model = K31ForCausalLM(config).to_serving_dtype(dtype).eval()
    caches = Caches.allocate(config, batch, history + config.page_size, dtype=dtype)
    fill(caches)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (batch, 1), generator=generator)
    return Entry("decode", model, (tokens, caches, torch.full((batch,), history)))


def prompt_roof(name: str, dtype: torch.dtype, length: int) -> Roof:
    """Multiplications and additions of all weights that a prompt meets."""
    config = CONFIGS[name]()
    with torch.device("meta"):
        model = K31ForCausalLM(config)
    return Roof(str(dtype).removeprefix("torch."), weight_products(model, config.num_experts_per_token) * length)


def step_roof(config: K31Config, dtype: torch.dtype, batch: int, history: int) -> Roof:
    """See `bytes_of_a_step`."""
    return Roof("read", bytes_of_a_step(config, dtype, batch, history))


def bytes_of_a_step(config: K31Config, dtype: torch.dtype, batch: int, history: int) -> float:
    """What a decode step cannot do without reading: each weight once, of the experts those that some token picks, all
    keys of the indexers, the latents that they select, and the states of KDA, which are written as well.

    Tokens are taken to pick their experts by chance.
    """
    with torch.device("meta"):
        model = K31ForCausalLM(config).to_serving_dtype(dtype)
    kept = {name: weight.numel() * weight.element_size() for name, weight in model.named_parameters()}
    experts = sum(size for name, size in kept.items() if ".experts." in name)
    looked_up = sum(size for name, size in kept.items() if "embed" in name)
    picked = 1 - (1 - config.num_experts_per_token / config.num_experts) ** batch
    weights = sum(kept.values()) - looked_up - experts * (1 - picked)
    layers = range(config.num_hidden_layers)
    item = dtype.itemsize
    keys = sum(map(config.has_indexer, layers)) * history * config.index_head_dim * item
    latents = min(history, config.index_topk) * (config.kv_lora_rank + config.qk_rope_head_dim) * item
    latents *= len(config.full_attention_layers)
    states = config.kda_num_heads * config.kda_key_dim * config.kda_value_dim * 4 * 2
    states *= config.num_hidden_layers - len(config.full_attention_layers)
    return weights + batch * (keys + latents + states)


def prompt(name: str, dtype: torch.dtype, length: int) -> Entry:
    """A prompt of so many tokens into empty caches."""
    config = CONFIGS[name]()
    model = K31ForCausalLM(config).to_serving_dtype(dtype).eval()
    caches = Caches.allocate(config, 1, length, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (1, length), generator=generator)
    return Entry("prefill", model, (tokens, caches, torch.zeros(1, dtype=torch.int64)))


def fill(caches: Caches) -> None:
    """Random numbers of the size that the model's norms give its own, in every cache."""
    generator = torch.Generator().manual_seed(2)
    for cache in caches.layers:
        for tensor in cache:
            if tensor is not None:
                tensor.normal_(generator=generator)
