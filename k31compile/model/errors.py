"""What the model refuses: each message says what is wrong, where, and what to do."""


class ModelError(Exception):
    """Any refusal of this package."""


class ConfigError(ModelError, ValueError):
    """A configuration that no K3.1 model can have, or a config.json that cannot be read as one."""


class WeightsError(ModelError):
    """A weights folder that does not fit the model; nothing has been loaded."""


class CapacityError(ModelError, ValueError):
    """More tokens than the caches have room for."""
