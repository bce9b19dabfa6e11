"""A process that warms: it is told what on its standard input, and tells on its standard output how it goes.

Lines of JSON both ways. The first line sets it up, {"threads", "check", "debug"}; each further one is {"do": "list" or
"warm", "spec", "entry", "sizes"} and is answered by events, the last of them "listed", "done" or "failed".
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from k31compile.cli.warm_clock import process_age

if TYPE_CHECKING:
    from k31compile.counted import CountedBackend
    from k31compile.entry import Entry

Tell = Callable[..., None]


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a model prints must not look like an answer

    def tell(event: str, **data: Any) -> None:
        print(json.dumps({"event": event, **data}), file=answers)

    setup = json.loads(sys.stdin.readline())
    if setup["check"]:
        os.environ["K31_REQUIRE_WARM"] = "1"
    import torch

    import k31compile.counted  # noqa: F401  (what every job needs: it counts as start, not as the first job's)

    if setup["threads"]:
        torch.set_num_threads(setup["threads"])
    worker = _Worker(tell, setup["check"])
    tell("ready", seconds=process_age())
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker.serve(request)
        except Exception as error:
            if setup["debug"]:
                traceback.print_exc()
            tell("failed", error=_as_dict(error), seconds=worker.seconds(), phases=worker.phases())


class _Worker:
    def __init__(self, tell: Tell, check: bool) -> None:
        self.tell, self.check = tell, check
        self._spec: Mapping[str, Any] | None = None
        self._entries: list[Entry] = []
        self._begin = time.perf_counter()
        self._phases: dict[str, float] = {}

    def serve(self, request: Mapping[str, Any]) -> None:
        self._begin, self._phases = time.perf_counter(), {}
        entries = self._load(request["spec"])
        if request["do"] == "list":
            found = [{"name": entry.name, "names": _names(entry)} for entry in entries]
            self.tell("listed", entries=found, phases=self.phases())
            return
        entry = next(entry for entry in entries if entry.name == request["entry"])
        result = self._warm(entry, request["spec"], request["sizes"])
        self.tell("done", **result, seconds=self.seconds(), phases=self.phases())

    def seconds(self) -> float:
        """How long the request at hand has taken."""
        return time.perf_counter() - self._begin

    def phases(self) -> dict[str, float]:
        """Where those seconds went; they add up."""
        found = dict(self._phases)
        found["other"] = found.get("other", 0.0) + max(self.seconds() - sum(found.values()), 0.0)
        return found

    def _load(self, spec: Mapping[str, Any]) -> list[Entry]:
        if self._spec != spec:
            from k31compile.cli.target import load_entries
            from k31compile.kernels.cpu.loader import available

            # Every key says whether they serve: where they are not there yet, this is where they are built.
            self.tell("stage", text="looking for the kernels, or building them")
            available()
            self._phases["kernels"] = self.seconds()
            self.tell("stage", text="loading the model")
            begin = time.perf_counter()
            self._spec, self._entries = None, []
            self._entries = load_entries(spec["target"], spec["dtype"], spec["layers"])
            self._spec = spec
            self._phases["model"] = time.perf_counter() - begin
        return self._entries

    def _warm(self, entry: Entry, spec: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        from k31compile.buckets import resize_entry
        from k31compile.cli.calling import calling
        from k31compile.counted import CountedBackend
        from k31compile.errors import ColdCompileError

        small = resize_entry(entry, sizes, spec["fill"]) if sizes else entry
        options = {**spec["options"], **({"target": spec["product"]} if spec["product"] else {})}
        if self.check:
            options["require_warm"] = True
        backend = CountedBackend(options, lambda text: self.tell("stage", text=text))
        self.tell("stage", text="tracing")
        begin = time.perf_counter()
        why = ""
        try:
            with _Telling(self.tell), calling(small) as notes:
                _call(small, backend)
        except ColdCompileError as error:
            why, notes = error.what, []
        finally:
            self._phases |= backend.phases(time.perf_counter() - begin)
        return _outcome(backend, options, why, notes)


def _call(entry: Entry, backend: CountedBackend) -> None:
    import torch

    from k31compile.counted import own_error
    from k31compile.errors import WarmError

    torch._dynamo.reset()
    try:
        with entry.grad_mode():
            torch.compile(entry.model, backend=backend, dynamic=False)(*entry.args, **entry.kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise own_error(error) from error
    if not backend.runs:
        raise WarmError(f"no graph of {entry.name} was compiled: it runs as it is written", hint="k31 explain says why")


def _outcome(backend: CountedBackend, options: Mapping[str, Any], cold: str, notes: list[str]) -> dict[str, Any]:
    from k31compile.cache.opened import open_store

    caches = [report.cache for report in backend.reports]
    hits = sum(bool(cache["hit"]) for cache in caches)
    state, why = ("found", "") if hits == len(caches) else ("compiled", "; ".join(_whys(caches)))
    if cold:
        state, why = "cold", cold
    elif state == "compiled":
        store = open_store(options.get("cache", True))
        lost = [cache for cache in caches if cache["key"] is None or store.find(cache["key"]) is None]
        if lost:
            state, why = "not kept", "; ".join(_whys(lost))
    notes = list(dict.fromkeys([*(note for report in backend.reports for note in report.notes), *notes]))
    return {
        "state": state,
        "why": why,
        "keys": [cache["key"] for cache in caches if cache["key"]],
        "hits": hits,
        "misses": len(caches) - hits,
        "notes": notes,
        "learned": sorted({name for report in backend.reports for name in report.learned}),
    }


def _whys(caches: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(cache["why"]) for cache in caches if not cache["hit"]))


class _Telling:
    """Tell of every graph that the cache does not have, the moment it is known; warnings go to the process's log."""

    def __init__(self, tell: Tell) -> None:
        self.handler = logging.Handler()
        self.handler.emit = lambda record: _tell_missed(tell, record)  # type: ignore[method-assign]
        self.log = logging.getLogger("k31compile")
        self.caught = warnings.catch_warnings()

    def __enter__(self) -> None:
        self.level = self.log.level
        self.log.addHandler(self.handler)
        self.log.setLevel(logging.INFO)
        self.caught.__enter__()
        warnings.simplefilter("always")

    def __exit__(self, *_: Any) -> None:
        self.caught.__exit__(None, None, None)
        self.log.setLevel(self.level)
        self.log.removeHandler(self.handler)


def _tell_missed(tell: Tell, record: logging.LogRecord) -> None:
    from k31compile.keeping import MISSED

    if (key := getattr(record, MISSED, None)) is not None:
        tell("missed", key=key, text=record.getMessage())


def _names(entry: Entry) -> list[str]:
    return sorted({bounds[0] for dims in entry.dynamic.values() for bounds in dims.values()})


def _as_dict(error: Exception) -> dict[str, str]:
    from k31compile.cli.console import in_one_line
    from k31compile.errors import K31Error

    return (error if isinstance(error, K31Error) else K31Error(in_one_line(error))).to_dict()
