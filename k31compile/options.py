"""The options of the compiler: one frozen dataclass, validated before anything is compiled."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NoReturn

from k31compile.errors import NotBuiltYetError, OptionError

FUSIONS = (
    "attn_res_prepare",
    "attn_res_update",
    "gated_delta_chunk",
    "gated_delta_recurrent",
    "gated_rms_norm",
    "grouped_experts",
    "indexer_prolog",
    "kda_chunk",
    "kda_recurrent",
    "lightning_indexer",
    "mega_kda",
    "mla_prolog",
    "moe_gating_top_k",
    "short_conv",
    "sparse_flash_attention",
    "static_top_k",
)
"""The fusions that this version has."""

PLANNED_FUSIONS = (
    "lightning_indexer_quant",
    "mx_quant",
    "sparse_flash_attention_quant",
    "tile_quant",
)
"""Names of the interface whose fusions are not built yet; asking for one is refused as such."""

# torch.compile takes this key out of the options itself; where a version hands it on, it is not ours.
_FOREIGN_KEYS = frozenset({"guard_filter_fn"})

# option -> (the values that work, the values that the interface names and that are not built yet)
_VALUES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "target": ((None, "cpu", "ascend-a3", "ascend-950"), ("cuda",)),
    "quant": (("none",), ("layered",)),
    "layout": (("auto", "nd", "nz"), ()),
    "streams": (("auto", 1, 2, 3, 4), ()),
    "super_kernel": ((True, False), ()),
    "codegen": (("inductor", "ops", "tiered"), ()),
    "strict": ((False, True), ()),
    "require_warm": ((False, True), ()),
    "guards": (("safe", "modules", "none"), ()),
    "choice": (("fused", "measured"), ()),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose; every field has a default that suits most models.

    Attributes:
        target: where the graph will run; None follows the device of the inputs (cpu for meta tensors).
        fuse: "all", or the names of the fusions that may happen (an empty list for none).
        quant: "none"; quantised arithmetic is never chosen silently.
        layout: "auto", "nd" or "nz", the memory layout of weights; on the CPU "nz" packs copies of them for oneDNN.
        streams: "auto", or how many streams a schedule may use on an Ascend target, 1 to 4.
        super_kernel: whether launch-bound regions may be merged on targets that can.
        cache: whether compiled graphs may be kept (True) or not (False), or the folder or fsspec URL to keep them in.
        codegen: "inductor" builds the code around our operators; "ops" runs it as it is, at once; "tiered" runs it at
            once while a child process builds it, and then as built.
        strict: raise where the report would otherwise only tell.
        lock: path of a fusion contract; a graph that gets less than it says is an error.
        guards: which guards a function of `k31compile.compile` keeps: "safe" all, "modules" none on the model's own
            modules and parameters, "none" none on globals either; those on arguments always.
        choice: "fused" runs what was fused; "measured" builds each graph also as it was written, times both at its
            first call, and keeps the faster one (docs/performance.md, Never slower).
        confirm_bytes: what one confirmation may take, in bytes; a larger region is refused and the refusal says so.
        require_warm: an error where a graph is not found in the cache, with the ingredient that differs; so does the
            environment variable K31_REQUIRE_WARM=1.
        node_budget: how many graph nodes one unrolled Python loop may make; past it the loop runs as Python.

    """

    target: str | None = None
    fuse: Literal["all"] | tuple[str, ...] = "all"
    quant: str = "none"
    layout: str = "auto"
    streams: str | int = "auto"
    super_kernel: bool = True
    cache: bool | str = True
    codegen: str = "inductor"
    strict: bool = False
    lock: str | None = None
    guards: str = "safe"
    choice: str = "fused"
    confirm_bytes: int = 4 << 30
    node_budget: int = 10_000
    require_warm: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "fuse", _checked_fuse(self.fuse))
        for name, (built, planned) in _VALUES.items():
            _check_value(name, getattr(self, name), built, planned)
        for name in ("confirm_bytes", "node_budget"):
            count = getattr(self, name)
            if type(count) is not int or count < 1:
                raise OptionError(f"option {name!r} does not take {count!r}", hint="it takes a whole number from 1 on")
        if not isinstance(self.cache, bool):
            if not isinstance(self.cache, str | os.PathLike) or not os.fspath(self.cache):
                _bad_value("cache", self.cache, (True, False, "FOLDER", "URL"))
            object.__setattr__(self, "cache", os.fspath(self.cache))
        if self.streams in (2, 3, 4) and not str(self.target).startswith("ascend"):
            _not_built("streams", self.streams, "with target='ascend-a3' or 'ascend-950'; elsewhere 'auto' and 1")
        if self.require_warm and self.cache is False:
            raise OptionError("option require_warm=True needs a cache", hint="leave cache=True, or name a folder")
        if self.choice == "measured":
            self._check_measurable()
        if self.codegen == "tiered" and self.cache is False:
            raise OptionError("option codegen='tiered' needs cache=True", hint="the child builds into Inductor's cache")
        if self.lock is not None:
            if not isinstance(self.lock, str | os.PathLike) or not os.fspath(self.lock):
                raise OptionError(f"option 'lock' does not take {self.lock!r}", hint="it takes the path of a contract")
            object.__setattr__(self, "lock", os.fspath(self.lock))

    def _check_measurable(self) -> None:
        """What is not built by Inductor for this machine cannot be timed against what is."""
        for is_other, name, value in (
            (self.codegen != "inductor", "codegen", "'inductor'"),
            (self.target not in (None, "cpu"), "target", "None or 'cpu'"),
            (self.lock is not None, "lock", "None: a contract names fusions, and a measurement may leave them out"),
        ):
            if is_other:
                given = getattr(self, name)
                raise OptionError(
                    f"option choice='measured' does not go with {name}={given!r}", hint=f"it wants {value}"
                )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> Options:
        """Build options from what a user gave to ``torch.compile(..., options=...)``."""
        given = {key: value for key, value in (mapping or {}).items() if key not in _FOREIGN_KEYS}
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise OptionError(f"there is no option {key!r}", hint=_nearest(key, known))
        return cls(**given)

    def fuses(self, name: str) -> bool:
        """Tell whether the fusion of this name may happen."""
        return self.fuse == "all" or name in self.fuse

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain JSON values."""
        values = asdict(self)
        values["fuse"] = "all" if self.fuse == "all" else list(self.fuse)
        return values

    def stable_hash(self) -> str:
        """Return a hash that is equal in every process for equal options."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def _checked_fuse(value: Any) -> Literal["all"] | tuple[str, ...]:
    if value == "all":
        return "all"
    if isinstance(value, str) or not isinstance(value, Iterable):
        one = f"; write fuse=[{value!r}]" if value in FUSIONS else ""
        raise OptionError(
            f"option 'fuse' does not take {value!r}",
            hint=f"it takes 'all' or a list of {', '.join(FUSIONS)}{one}",
        )
    names = list(value)
    for name in names:
        if name in PLANNED_FUSIONS:
            _not_built("fuse", name, f"available: {', '.join(FUSIONS)}")
        if name not in FUSIONS:
            raise OptionError(f"option 'fuse' has no fusion {name!r}", hint=_nearest(str(name), FUSIONS))
    return tuple(sorted(set(names)))


def _check_value(name: str, value: Any, built: tuple[Any, ...], planned: tuple[Any, ...]) -> None:
    # By type too: True == 1 must not pass for a number of streams, nor 1 for a switch.
    if any(type(value) is type(known) and value == known for known in built):
        return
    if any(type(value) is type(known) and value == known for known in planned):
        _not_built(name, value, f"available: {_listed(built)}")
    _bad_value(name, value, built)


def _bad_value(name: str, value: Any, built: tuple[Any, ...]) -> NoReturn:
    hint = f"it takes {_listed(built)}"
    close = difflib.get_close_matches(str(value), [known for known in built if isinstance(known, str)], n=1)
    if close:
        hint += f"; did you mean {close[0]!r}?"
    raise OptionError(f"option {name!r} does not take {value!r}", hint=hint)


def _not_built(name: str, value: Any, available: str) -> NoReturn:
    raise NotBuiltYetError(f"option {name}={value!r} is not built yet", hint=available)


def _nearest(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)[0]
    return f"did you mean {close!r}? known: {', '.join(names)}"


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(repr(value) for value in values)
