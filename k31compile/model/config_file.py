"""config.json, the file beside the weights that says which model they are for; reading is strict."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from k31compile.model.config import K31Config
from k31compile.model.errors import ConfigError, WeightsError

CONFIG_FILE = "config.json"
_MODEL_TYPE = "k31"


def save_config(config: K31Config, folder: str | Path) -> None:
    """Write config.json with every field."""
    write_json(Path(folder) / CONFIG_FILE, {"model_type": _MODEL_TYPE, **dataclasses.asdict(config)})


def load_config(folder: str | Path) -> K31Config:
    """Read config.json; an unknown, missing or ill-typed field raises ConfigError with its name."""
    path = Path(folder) / CONFIG_FILE
    values = read_json(path, ConfigError)
    if values.pop("model_type", None) != _MODEL_TYPE:
        raise ConfigError(f'{path}: model_type is not "{_MODEL_TYPE}", so this is no K3.1 configuration')
    known = {field.name: field for field in dataclasses.fields(K31Config)}
    for what, names in (("unknown", values.keys() - known), ("missing", known.keys() - values)):
        if names:
            raise ConfigError(f"{path}: {what} fields: {', '.join(sorted(names))}")
    for name, value in values.items():
        values[name] = tuple(value) if isinstance(value, list) else value
        default = known[name].default
        if default is not None and value is not None and not _same_kind(values[name], default):
            raise ConfigError(f"{path}: {name} = {value!r} is not of type {type(default).__name__}")
    return K31Config(**values)


def _same_kind(value: object, default: object) -> bool:
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def read_json(path: Path, error: type[ConfigError] | type[WeightsError]) -> dict[str, Any]:
    """Read a JSON object, or raise `error` with the path and the reason."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise error(f"{path} does not exist: give the folder that save_weights wrote") from None
    except (OSError, ValueError) as cause:
        raise error(f"{path} cannot be read as JSON: {cause}") from None
    if not isinstance(content, dict):
        raise error(f"{path} does not hold a JSON object")
    return content
