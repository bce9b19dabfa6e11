"""Whether a payload for an Ascend product fits what is here: torch_npu, CANN and the providers of operators."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from k31compile.errors import ArtefactError

CANN = "CANN"
_FOLDERS = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_FILES = (f"{platform.machine()}-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.info")
_VERSION = re.compile(r"^version\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)


def check_payload(payload: Mapping[str, Any], where: str) -> None:
    """Raise ArtefactError unless a payload was made with the versions that are here.

    Without torch_npu nothing can run it here, and it may still be looked at: then only what is installed is compared.
    """
    made_with: Mapping[str, str] = payload["versions"]
    here = installed_versions(made_with)
    if "torch_npu" not in here:
        here.pop("torch", None)
    for name, made in sorted(made_with.items(), key=lambda item: item[0] == "torch"):  # torch_npu's goes with it
        if name in here and _plain(here[name]) != _plain(made):
            what = f"entry {payload['name']!r} was made with {name} {made}, here it is {here[name]}"
            raise ArtefactError(what, where, hint="make it again with the versions of the machine that runs it")


def installed_versions(names: Mapping[str, Any]) -> dict[str, str]:
    """The versions that are here of what is named, without what is not here or does not tell."""
    from k31compile.targets.ascend.providers import PROVIDERS, installed_version

    found: dict[str, str | None] = {}
    for name in names:
        if name == "torch":
            found[name] = torch.__version__
        elif name == CANN:
            found[name] = cann_version()
        elif name in PROVIDERS and PROVIDERS[name].distribution:  # plain operators are nobody's
            found[name] = installed_version(PROVIDERS[name].distribution)
    return {name: version for name, version in found.items() if version is not None}


def cann_version() -> str | None:
    """The version of CANN that this process is told to use; None where none is there or says its version."""
    return next(_told_versions(), None)


def _told_versions() -> Iterator[str]:
    for folder in filter(None, map(os.environ.get, _FOLDERS)):
        for name in _FILES:
            try:
                found = _VERSION.search((Path(folder) / name).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):
                continue
            if found is not None:
                yield found[1]


def _plain(version: str) -> str:
    """A version without how it was built, as in 2.13.0+cpu."""
    return version.partition("+")[0].lower()
