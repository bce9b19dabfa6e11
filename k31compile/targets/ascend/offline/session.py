"""torch_npu and torchair opened for a product that is not here: stand-ins for CANN answer for that product."""

import contextlib
import ctypes
import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k31compile.errors import BuildError
from k31compile.targets.ascend.offline.stubs import MAIN, built_stubs, stub_names
from k31compile.targets.ascend.profiles import Profile

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_opened: list["Session"] = []


@dataclass(frozen=True)
class Session:
    """An opened torchair: the profile that it answers for, and its modules' versions."""

    profile: Profile
    versions: dict[str, str]


class NoStream:
    """Stands where a stream would: it has a number and runs nothing."""

    _made = 0

    def __init__(self, *_: Any, stream_id: int | None = None, **__: Any) -> None:
        NoStream._made += 1
        self.stream_id = NoStream._made if stream_id is None else stream_id
        self.device_index, self.device_type = 0, 20


class NoEvent:
    """Stands where an event would: npugraph_ex records it and waits for it while it looks at a graph."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Record nothing."""

    def wait(self, stream: Any = None) -> None:
        """Wait for nothing."""


_CURRENT = NoStream(stream_id=0)


def open_session(profile: Profile) -> Session:
    """Load torch_npu over stand-ins and let it answer for `profile`; a second profile in one process is fine.

    Raises:
        BuildError: torch_npu is not installed or cannot be loaded.
    """
    if not _opened:
        _load(profile)
    if profile.path == "npugraph_ex":
        _load_npugraph_ex()
    _answer_for(profile)
    import torch
    import torch_npu

    session = Session(profile, {"torch": torch.__version__, "torch_npu": torch_npu.__version__, "CANN": profile.cann})
    _opened[:] = [session]
    return session


def _load(profile: Profile) -> None:
    # The chip's name is asked for once, while torch_npu is imported.
    os.environ.setdefault("K31_ASCEND_SOC", profile.soc_name)
    os.environ[_AUTOLOAD] = "0"
    if "torch_npu" not in sys.modules:
        folder = built_stubs()
        for name in (MAIN, *stub_names(folder)):
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    try:
        # It prints that there is no CANN, which is known here and would stand in the middle of a JSON document.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            import torch_npu
            import torch_npu.dynamo  # noqa: F401  (puts torchair on the path)
            import torchair
            import torchair.core._backend
            import torchair.ops
            import torchair.scope
            import torchair.scope._wait_tensor
    except (ImportError, OSError) as error:
        raise BuildError(f"torch_npu does not load over stand-ins of CANN: {error}") from error
    # The number of the device would be asked of the driver.
    torchair.core._backend._cached_device_id = 0


def _load_npugraph_ex() -> None:
    """Behind torchair, which cannot be imported once npugraph_ex is there.

    It makes the events that a graph names, and asks for the device, before anything would be captured.
    """
    import torch_npu.dynamo.npugraph_ex  # puts it on the path under the name that it has for itself
    import torch_npu.npu

    # Its operators for events are there once this is imported.
    importlib.import_module("npugraph_ex.ops._tagged_event")
    torch_npu.npu.Stream, torch_npu.npu.Event = NoStream, NoEvent
    torch_npu.npu.current_stream = lambda *_: _CURRENT
    torch_npu.npu.current_device = lambda: 0


def _answer_for(profile: Profile) -> None:
    """Meta functions and converters ask for the product's name and number and for CANN's version."""
    from packaging.version import parse

    def soc_version() -> int:
        return profile.soc_version

    def is_at_least(version: str, module: str = "CANN") -> bool:
        return parse(profile.cann) >= parse(version.replace(".RC", "rc"))

    import torch_npu.npu

    _replace("get_soc_version", soc_version)
    _replace("_is_gte_cann_version", is_at_least)
    torch_npu.npu.get_device_name = lambda *_: profile.soc_name


def _replace(name: str, answer: Callable[..., Any]) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("torch_npu", "torchair", "npugraph_ex")) and name in getattr(module, "__dict__", {}):
            setattr(module, name, answer)
