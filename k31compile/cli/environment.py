"""The environment of the command, and the one that the user's own scripts see."""

from __future__ import annotations

import os

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_set_by_us = False


def prepare() -> None:
    """Keep torch from loading vendor packages by itself; must run before anything imports torch.

    Where torch-npu is installed without CANN, ``import torch`` fails by torch-npu's autoload.
    """
    global _set_by_us
    if AUTOLOAD not in os.environ:
        os.environ[AUTOLOAD] = "0"
        _set_by_us = True


def of_user() -> dict[str, str]:
    """Return the environment as the user's own scripts see it."""
    environment = dict(os.environ)
    if _set_by_us:
        environment.pop(AUTOLOAD, None)
    return environment
