"""k31.toml: what is to be warmed, read and checked before anything is imported that takes a second."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from k31compile.bucket_sizes import bucket_sizes
from k31compile.errors import BucketError, NotBuiltYetError, OptionError, WarmFileError
from k31compile.options import Options

_SHARED = ("buckets", "dtype", "fill", "layers", "options", "targets")
_OF_FILE = ("entries", "threads", "workers", *_SHARED)
_OF_ENTRY = ("target", *_SHARED)
_DTYPES = ("fp32", "bf16")
_MOST_WORKERS = 64


@dataclass(frozen=True)
class WarmSpec:
    """One TARGET to be warmed for one product, in all its buckets.

    Attributes:
        target: TARGET as on a command line.
        product: the option `target` of the compiler; empty for that of the inputs' device.
        options: further options of the compiler.
        buckets: name of a dynamic dimension -> sizes.
        fill: path of an argument -> what it is filled up with, 0 where nothing is said.
        dtype, layers: as the options of `k31 check`.

    """

    target: str
    product: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    buckets: Mapping[str, list[int]] = field(default_factory=dict)
    fill: Mapping[str, float] = field(default_factory=dict)
    dtype: str | None = None
    layers: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class WarmPlan:
    """What is to be warmed: where TARGETs are looked for, how many processes do it, and with how many threads each."""

    folder: Path
    specs: tuple[WarmSpec, ...]
    workers: int
    threads: int | None = None


def read_plan(path: Path, workers: int | None = None) -> WarmPlan:
    """Read a k31.toml; `workers` stands above what it says.

    Raises:
        WarmFileError: it cannot be read, or a field of it is not what it may be.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "write one as docs/warm.md shows, or name it: k31 cache warm FILE"
        raise WarmFileError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WarmFileError(f"{path} is no TOML: {error}") from error
    return _Reader(str(path)).plan(data, path.resolve().parent, workers)


def plain_plan(targets: Iterable[str], options: Mapping[str, Any] | None = None) -> WarmPlan:
    """A plan for TARGETs as they are, looked for from here, with these options of the compiler."""
    return WarmPlan(Path.cwd(), tuple(WarmSpec(target, options=dict(options or {})) for target in targets), 1)


@dataclass(frozen=True)
class _Reader:
    where: str

    def plan(self, data: dict[str, Any], folder: Path, workers: int | None) -> WarmPlan:
        self._check_names(data, _OF_FILE, "the file")
        listed = data.get("entries")
        if not isinstance(listed, list) or not listed:
            self._wrong("entries", listed, 'a list of TARGETs, as ["model.py:decode"], or tables [[entries]]')
        shared = {name: data[name] for name in _SHARED if name in data}
        specs = [spec for place, entry in enumerate(listed) for spec in self._entry(entry, shared, f"entries[{place}]")]
        count = workers if workers is not None else data.get("workers", min(os.cpu_count() or 1, len(specs)))
        self._check_count(count, "workers", _MOST_WORKERS)
        if "threads" in data:
            self._check_count(data["threads"], "threads", 1024)
        return WarmPlan(folder, tuple(specs), count, data.get("threads"))

    def _entry(self, entry: Any, shared: Mapping[str, Any], at: str) -> list[WarmSpec]:
        own = {"target": entry} if isinstance(entry, str) else entry
        if not isinstance(own, dict):
            self._wrong(at, entry, "a TARGET, or a table with target = TARGET")
        self._check_names(own, _OF_ENTRY, at)
        target = own.get("target")
        if not isinstance(target, str) or not target:
            self._wrong(f"{at}.target", target, "a TARGET, as model.py:decode or tiny:decode")
        for name in ("options", "buckets", "fill"):
            for there, table in (("", shared), (f"{at}.", own)):
                if not isinstance(table.get(name, {}), dict):
                    self._wrong(f"{there}{name}", table[name], "a table")
        options = {**shared.get("options", {}), **own.get("options", {})}
        buckets = {**shared.get("buckets", {}), **own.get("buckets", {})}
        products = own.get("targets", shared.get("targets", [""]))
        if not isinstance(products, list) or not products:
            self._wrong(f"{at}.targets", products, 'a list, as ["cpu"]')
        rest = {name: own.get(name, shared.get(name)) for name in ("dtype", "layers")}
        if rest["dtype"] not in (None, *_DTYPES):
            self._wrong(f"{at}.dtype", rest["dtype"], " or ".join(_DTYPES), _DTYPES)
        if rest["layers"] is not None:
            self._check_count(rest["layers"], f"{at}.layers", 1 << 20)
        fill = self._fill({**shared.get("fill", {}), **own.get("fill", {})}, at)
        sizes = self._buckets(buckets, at)
        return [
            WarmSpec(target, product, self._options(options, product, at), sizes, fill, **rest) for product in products
        ]

    def _options(self, options: Mapping[str, Any], product: Any, at: str) -> dict[str, Any]:
        for name, remedy in (
            ("target", "write targets = [...] beside options"),
            ("require_warm", "leave it out; k31 cache warm --check compiles nothing"),
        ):
            if name in options:
                self._fail(f"{at}.options has {name!r}", remedy)
        if options.get("cache") is False:
            self._fail(f"{at}.options has cache = false", "a cache that is not kept cannot be warmed")
        try:
            Options.from_mapping({**options, **({"target": product} if product != "" else {})})
        except (OptionError, NotBuiltYetError) as error:
            self._fail(f"{at}: {error.what}", error.hint)
        return dict(options)

    def _buckets(self, buckets: Mapping[str, Any], at: str) -> dict[str, list[int]]:
        try:
            return {name: list(bucket_sizes(spec, name)) for name, spec in buckets.items()}
        except BucketError as error:
            self._fail(f"{at}: {error.what}", error.hint)

    def _fill(self, fill: Mapping[str, Any], at: str) -> dict[str, float]:
        for path, value in fill.items():
            if not isinstance(value, bool | int | float):
                self._wrong(f"{at}.fill.{path}", value, "a number, true or false")
        return dict(fill)

    def _check_names(self, table: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
        for name in table:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                self._fail(f"{at} has {name!r}", f"did you mean {close!r}? known: {', '.join(sorted(known))}")

    def _check_count(self, value: Any, at: str, most: int) -> None:
        if type(value) is not int or not 1 <= value <= most:
            self._wrong(at, value, f"a whole number from 1 to {most}")

    def _wrong(self, at: str, value: Any, allowed: str, known: tuple[str, ...] = ()) -> NoReturn:
        close = difflib.get_close_matches(str(value), known, n=1) if known else []
        guess = f"; did you mean {close[0]!r}?" if close else ""
        self._fail(f"{at} is {value!r}" if value is not None else f"{at} is missing", f"it takes {allowed}{guess}")

    def _fail(self, what: str, hint: str) -> NoReturn:
        raise WarmFileError(what, where=self.where, hint=hint)
