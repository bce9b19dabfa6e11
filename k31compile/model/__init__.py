"""Kimi K3.1 Pro in plain PyTorch, to be read beside K3.1 spec 2; no operator of ours is used here."""

if not __name__.startswith("k31compile."):
    raise ImportError(f"import k31compile.model instead of {__name__}, which is only a link to it")

from k31compile.model.caches import Caches, KdaCache, MlaCache, Step, make_step
from k31compile.model.config import CONFIGS, K31Config
from k31compile.model.config_file import load_config, save_config
from k31compile.model.errors import CapacityError, ConfigError, ModelError, WeightsError
from k31compile.model.generate import generate, prefill
from k31compile.model.k31 import K31ForCausalLM, K31Model, count_parameters
from k31compile.model.weights import load_model, load_weights, save_weights

__all__ = [
    "CONFIGS",
    "Caches",
    "CapacityError",
    "ConfigError",
    "K31Config",
    "K31ForCausalLM",
    "K31Model",
    "KdaCache",
    "MlaCache",
    "ModelError",
    "Step",
    "WeightsError",
    "count_parameters",
    "generate",
    "load_config",
    "load_model",
    "load_weights",
    "make_step",
    "prefill",
    "save_config",
    "save_weights",
]
