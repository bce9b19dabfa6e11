"""One compiled graph's way into the cache and out of it again, as the backend takes it."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from k31compile.cache.entry_store import EntryStore, FoundEntry
from k31compile.cache.key import Key, make_key
from k31compile.cache.opened import open_store
from k31compile.cache.surroundings import have_sources_changed
from k31compile.errors import ColdCompileError, KeyingError, NativeError, StoreError
from k31compile.graph.sizes import input_values, number_inputs
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.source import examine
from k31compile.options import Options
from k31compile.report import Report
from k31compile.targets.native.load import EXTERNS, LIBRARY, load_native

log = logging.getLogger("k31compile")

Compiled = Callable[..., Any]

_KIND = "native"
MISSED = "k31_missed"
"""A record of the log that has this attribute says that a graph was not found, and is compiled where it may be."""

_REQUIRE_WARM = "K31_REQUIRE_WARM"


@dataclass
class Keeping:
    """A graph that is being compiled, with the key and the store that it is kept under."""

    store: EntryStore
    key: Key
    sizes: Sequence[Any]
    is_warm_required: bool
    numbers: Sequence[torch.SymFloat] = ()

    def find(self, report: Report) -> Compiled | None:
        """What an earlier compile of this graph kept, loaded, with its report; None where there is nothing.

        Raises:
            ColdCompileError: there is nothing, and something had to be there.
        """
        begin = time.perf_counter()
        for key in (self.key, self.key.with_hints()) if self.sizes else (self.key,):
            entry = self.store.find(key.digest)
            compiled = None if entry is None else self._loaded(entry)
            if entry is not None and compiled is not None:
                report.restore(entry.manifest["report"])
                report.cache = {"hit": True, "level": 1, "key": entry.key, "why": "found, nothing was compiled"}
                report.phases["load"] = time.perf_counter() - begin
                self._hold_numbers()
                return compiled
        why = self.store.why_missed(self.key.ingredients)
        report.cache = {"hit": False, "level": 1, "key": self.key.digest, "why": why}
        log.info("graph %s is not in the cache: %s", self.key.digest[:12], why, extra={MISSED: self.key.digest})
        if self.is_warm_required:
            raise ColdCompileError(f"this graph is not in the cache: {why}", where=str(self.store.root))
        return None

    def _hold_numbers(self) -> None:
        """Let Dynamo guard on each number that is part of what was compiled, as a trace of the graph would."""
        for number in self.numbers:
            float(number)

    def build(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report
    ) -> Compiled:
        """Build a graph to a library, keep it and load it.

        Raises:
            NativeError: it cannot be built so.
        """
        compiled, keep = self.build_to_keep(module, example_inputs, report)
        keep()
        return compiled

    def build_to_keep(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], report: Report
    ) -> tuple[Compiled, Callable[[], None]]:
        """Build a graph to a library and load it; the second function keeps it, for whoever finds out whether it is it.

        Raises:
            NativeError: it cannot be built so.
        """
        from k31compile.targets.native.build import build_native

        scratch = Path(tempfile.mkdtemp(prefix="k31-build-"))

        def keep() -> None:
            self.keep(scratch, plan, guards, report)

        # The folder goes with the function that may still want it.
        weakref.finalize(keep, shutil.rmtree, scratch, ignore_errors=True)
        plan = build_native(module, example_inputs, scratch)
        guards = self._guards()
        return load_native(scratch, plan), keep

    def keep(self, built: Path, plan: Mapping[str, Any], guards: str, report: Report) -> None:
        """Keep the library in a folder, its plan, and what must hold of dynamic sizes; or tell the report."""
        files: dict[str, bytes | Path] = {"graph.txt": self.key.graph_text.encode()}
        files |= {name: built / name for name in (LIBRARY, EXTERNS)}
        program = {"plan": plan, "guards": guards}
        key = self._free_key()
        report.cache["key"] = key.digest
        if have_sources_changed():
            report.cache["why"] += (
                "; not kept: files of k31compile have changed since this process began, start it anew"
            )
            return
        kept = self.store.publish(key.digest, _KIND, key.ingredients, program, report.to_kept(), files)
        if kept is None:
            report.cache["why"] = f"{report.cache['why']}; it could not be kept"

    def _free_key(self) -> Key:
        """The key to keep this under: where another's conditions on sizes are in the way, the one with these sizes."""
        if self.sizes and self.store.find(self.key.digest) is not None:
            return self.key.with_hints()
        return self.key

    def _loaded(self, entry: FoundEntry) -> Compiled | None:
        program = entry.manifest["program"]
        if not self._meets(program["guards"]):
            return None
        try:
            return load_native(entry.folder, program["plan"])
        except NativeError as error:
            log.warning("cache entry %s is not used: %s", entry.key[:12], error.what)
            return None

    def _guards(self) -> str:
        """What must hold of the dynamic sizes for the library to be right; Dynamo itself asks it at each call."""
        if not self.sizes:
            return ""
        return str(_shape_env().produce_guards_expression(self.sizes, ignore_static=False) or "")

    def _meets(self, guards: str) -> bool:
        """Whether the sizes of this call meet the conditions; where they do Dynamo guards on them from now on."""
        if not guards:
            return True
        env = _shape_env()
        hints = [int(size.node.hint) for size in self.sizes]
        return bool(env.evaluate_guards_expression(guards, hints)) and bool(
            env.evaluate_guards_expression(guards, self.sizes)
        )


def begin_keeping(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report
) -> Keeping | None:
    """The way of this graph into the cache; None, with the reason in the report, where it must not be kept.

    Raises:
        ColdCompileError: it cannot be in the cache, and had to be.
    """
    is_warm_required = options.require_warm or os.environ.get(_REQUIRE_WARM) == "1"
    why = _why_not(options, example_inputs)
    if not why:
        try:
            begin = time.perf_counter()
            store = open_store(options.cache)
            key = make_key(module, example_inputs, options, options.target or "cpu", _digest)
            report.phases["key"] = time.perf_counter() - begin
            sizes = [value for value in input_values(module, example_inputs) if isinstance(value, torch.SymInt)]
            return Keeping(store, key, sizes, is_warm_required, number_inputs(module))
        except (KeyingError, StoreError) as error:
            why = f"not kept: {error}"
    report.cache["why"] = why
    if is_warm_required and options.cache is not False:
        raise ColdCompileError(f"this graph is not in the cache, {why}")
    return None


def _why_not(options: Options, example_inputs: Sequence[Any]) -> str:
    if options.cache is False:
        return "cache=False"
    if options.codegen == "ops":
        return "codegen='ops' builds nothing that could be kept"
    devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
    if devices - {"cpu"} or options.target not in (None, "cpu"):
        return "only graphs for a CPU are kept so far"
    return ""


def _shape_env() -> Any:
    context = TracingContext.try_get()
    assert context is not None
    assert context.fake_mode is not None
    return context.fake_mode.shape_env


def _digest(function: types.FunctionType) -> str:
    try:
        return examine(function).digest
    except Unfit as unfit:
        raise KeyingError(f"{function.__qualname__} stays a call in the graph, and {unfit}") from None
