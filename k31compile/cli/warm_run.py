"""Warming in several processes: who does what, what came of it, and where the time went."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from k31compile.bucket_sizes import combinations
from k31compile.cli import console
from k31compile.cli.warm_clock import process_age
from k31compile.cli.warm_file import WarmPlan, WarmSpec
from k31compile.errors import K31Error, WarmError, WarmFileError

_BEAT = 0.25
_MOST_ROUNDS = 3
_GOOD = ("compiled", "found")

Say = Callable[[str], None]


@dataclass
class Job:
    """One entry at one size for one product, and what came of it."""

    spec: WarmSpec
    entry: str
    sizes: dict[str, int]
    state: str = ""
    why: str = ""
    error: dict[str, str] | None = None
    seconds: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How lines call it."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        return " ".join(filter(None, (self.entry, sizes, f"for {self.spec.product}" if self.spec.product else "")))

    @property
    def is_warm(self) -> bool:
        """Whether a later process finds it."""
        return self.state in _GOOD

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        about = {"entry": self.entry, "target": self.spec.target, "sizes": self.sizes, "product": self.spec.product}
        counted = {name: self.result.get(name, 0) for name in ("hits", "misses")}
        listed = {name: self.result.get(name, []) for name in ("keys", "notes")}
        told = {"state": self.state, "why": self.why, "error": self.error}
        return {**about, **told, **counted, **listed, "seconds": self.seconds, "phases": self.phases}


@dataclass
class Warmed:
    """What came of a plan: its jobs, and the seconds of this process by phase, which add up to `wall`."""

    jobs: list[Job]
    wall: float
    phases: dict[str, float]
    workers: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        states = [job.state for job in self.jobs]
        return {
            "jobs": [job.to_dict() for job in self.jobs],
            "counts": {state: states.count(state) for state in sorted(set(states))},
            "hits": sum(job.result.get("hits", 0) for job in self.jobs),
            "misses": sum(job.result.get("misses", 0) for job in self.jobs),
            "wall": self.wall,
            "phases": self.phases,
            "workers": self.workers,
        }


def run_plan(plan: WarmPlan, check: bool, say: Say, beat: Say) -> Warmed:
    """Warm everything in a plan, or with `check` only look whether it is.

    `say` is given a line for everything that happens; `beat` is called several times a second with what goes on.

    Raises:
        K31Error: a TARGET of the plan cannot be loaded, or has no such dimension as a bucket names.
    """
    with _Pool(plan, check, say, beat) as pool:
        jobs = _jobs_of(plan, pool)
        again = jobs
        for _ in range(_MOST_ROUNDS):
            pool.work(again)
            learned = sorted({name for job in again for name in job.result.get("learned", ())})
            if check or not learned:
                break
            say(f"functions were learned ({', '.join(learned)}): what was warmed is looked at again")
            again = [job for job in jobs if job.is_warm]
        return Warmed(jobs, process_age(), pool.mean_phases(), len(pool.workers))


def warm_keys(plan: WarmPlan) -> list[str]:
    """The keys under which the cache has everything in a plan; nothing is compiled.

    Raises:
        WarmError: something of it is not in the cache.
    """
    warmed = run_plan(plan, True, lambda _: None, lambda _: None)
    for job in warmed.jobs:
        if not job.is_warm:
            why = job.why or str((job.error or {}).get("what", ""))
            raise WarmError(f"{job.name} is not in the cache: {why}", hint="k31 cache warm, then export")
    return sorted({key for job in warmed.jobs for key in job.result["keys"]})


def _jobs_of(plan: WarmPlan, pool: _Pool) -> list[Job]:
    jobs = []
    for spec in plan.specs:
        for entry in pool.list(spec):
            for name in spec.buckets:
                if name not in entry["names"]:
                    known = ", ".join(entry["names"]) or "none: write Entry(..., dynamic={path: {dim: (name, 1, max)}})"
                    raise WarmFileError(
                        f"buckets names {name!r}, and entry {entry['name']!r} has no such dimension",
                        where=spec.target,
                        hint=f"its dimensions: {known}",
                    )
            jobs += [Job(spec, entry["name"], sizes) for sizes in combinations(dict(spec.buckets))]
    return jobs


class _Worker:
    """A process and what it is at."""

    def __init__(self, events: queue.Queue[Any], plan: WarmPlan, check: bool) -> None:
        self.job: Job | None = None
        self.stage, self.since = "starting", time.monotonic()
        self.phases: dict[str, float] = {"start": 0.0}
        self.begin = process_age()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by stop)
        # -P: the folder that one happens to stand in must not be imported from
        command = [sys.executable, "-P", "-c", "from k31compile.cli.warm_worker import main; main()"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if console.debug_wanted() else self._log,
            text=True,
            cwd=plan.folder,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(events,), daemon=True).start()
        self.tell({"threads": plan.threads, "check": check, "debug": console.debug_wanted()})

    def tell(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.stage, self.since = "tracing" if self.phases["start"] else "starting", time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)

    def last_words(self) -> str:
        code = self.process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"its process ended with {code}" + (f": {lines[-1]}" if lines else "")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._log):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _read(self, events: queue.Queue[Any]) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self.process.stdout:
                events.put((self, json.loads(line)))
        events.put((self, None))


class _Pool:
    """The processes of a plan; one that dies fails its job and is replaced."""

    def __init__(self, plan: WarmPlan, check: bool, say: Say, beat: Say) -> None:
        self.plan, self.check, self.say, self.beat = plan, check, say, beat
        self.workers: list[_Worker] = []
        self._events: queue.Queue[Any] = queue.Queue()
        self._spent: list[dict[str, float]] = []
        self._count = self._total = 0

    def __enter__(self) -> _Pool:
        self._start()
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self.workers:
            worker.stop()

    def list(self, spec: WarmSpec) -> list[dict[str, Any]]:
        """The entries of a TARGET: name, and names of dynamic dimensions."""
        worker = self.workers[0]
        worker.tell({"do": "list", "spec": spec.to_dict()})
        while True:
            self.beat(f"{spec.target}: {worker.stage}, {time.monotonic() - worker.since:.0f} s")
            event = self._next()
            if event is None:
                continue
            _, told = event
            if told is None:
                raise K31Error(f"{spec.target} cannot be loaded: {worker.last_words()}", hint="--debug shows it all")
            _add(worker.phases, told.get("phases", {}))
            match told["event"]:
                case "ready":
                    worker.phases["start"] = worker.begin + told["seconds"]
                case "stage":
                    self._stage(worker, told["text"])
                case "listed":
                    return list(told["entries"])
                case "failed":
                    raise error_of(told["error"])

    def work(self, jobs: Iterable[Job]) -> None:
        """Do all jobs and return when the last one is done."""
        waiting = deque(jobs)
        self._count, self._total = 0, len(waiting)
        while len(self.workers) < min(self.plan.workers, len(waiting)):
            self._start()
        for worker in self.workers:
            self._give(worker, waiting)
        while any(worker.job for worker in self.workers):
            for worker in self.workers:
                if worker.job:
                    self.beat(f"{worker.job.name}: {worker.stage}, {time.monotonic() - worker.since:.0f} s")
            event = self._next()
            if event is not None:
                self._handle(*event, waiting)

    def mean_phases(self) -> dict[str, float]:
        """The seconds of this process by phase: the mean over its workers, with what each waited as `idle`."""
        wall = process_age()
        total: dict[str, float] = {}
        for worker in self.workers:
            _add(total, worker.phases)
            _add(total, {"idle": max(wall - sum(worker.phases.values()), 0.0)})
        return {name: seconds / len(self.workers) for name, seconds in total.items()}

    def _start(self) -> _Worker:
        worker = _Worker(self._events, self.plan, self.check)
        self.workers.append(worker)
        return worker

    def _next(self) -> tuple[_Worker, dict[str, Any] | None] | None:
        try:
            worker, told = self._events.get(timeout=_BEAT)
        except queue.Empty:
            return None
        return (worker, told) if worker in self.workers else None

    def _give(self, worker: _Worker, waiting: deque[Job]) -> None:
        worker.job = waiting.popleft() if waiting else None
        if worker.job is not None:
            self._count += 1
            verb = "checked" if self.check else "warmed"
            self.say(f"{self._count}/{self._total} {worker.job.name}: {verb}")
            job = worker.job
            worker.tell({"do": "warm", "spec": job.spec.to_dict(), "entry": job.entry, "sizes": job.sizes})

    def _handle(self, worker: _Worker, told: dict[str, Any] | None, waiting: deque[Job]) -> None:
        job = worker.job
        if told is None:
            if job is not None:
                error = K31Error(worker.last_words(), hint="--debug shows all of its output").to_dict()
                self._finish(job, {"state": "failed", "error": error})
            self.workers.remove(worker)
            worker.stop()
            if waiting:
                fresh = self._start()
                fresh.phases = {**worker.phases, "lost": max(process_age() - sum(worker.phases.values()), 0.0)}
                self._give(fresh, waiting)
            elif not self.workers:
                self.workers.append(worker)
            return
        _add(worker.phases, told.get("phases", {}))
        match told["event"]:
            case "ready":
                _add(worker.phases, {"start": worker.begin + told["seconds"] - sum(worker.phases.values())})
            case "stage":
                self._stage(worker, told["text"])
            case "missed":
                self._stage(worker, "compiling")
                assert job is not None
                self.say(f"{job.name}: {told['text']}")
            case "done" | "failed":
                if job is not None:
                    self._finish(job, {"state": "failed", **told})
                self._give(worker, waiting)

    def _stage(self, worker: _Worker, text: str) -> None:
        if text != worker.stage:
            worker.stage, worker.since = text, time.monotonic()

    def _finish(self, job: Job, told: dict[str, Any]) -> None:
        state = told["state"]
        # What was compiled in an earlier round and is found in a later one was compiled.
        job.state = job.state if state == "found" and job.state == "compiled" else state
        job.why, job.error = told.get("why", "") or (job.why if state == "found" else ""), told.get("error")
        job.seconds += told.get("seconds", 0.0)
        _add(job.phases, told.get("phases", {}))
        for name in ("hits", "misses"):
            told[name] = told.get(name, 0) + job.result.get(name, 0)
        job.result = told
        self.say(f"{job.name}: {describe(job, told)}")


def describe(job: Job, told: dict[str, Any]) -> str:
    """What came of a job in words, with its time."""
    seconds = f"{told.get('seconds', 0.0):.1f} s"
    match told["state"]:
        case "compiled":
            return f"compiled in {seconds} ({phases_text(told['phases'])})"
        case "found":
            return f"in the cache already, {seconds}"
        case "cold":
            return f"cold: {told['why']}"
        case "not kept":
            return f"compiled in {seconds} and not kept: {told['why']}"
    return f"failed: {error_of(job.error or {})}"


def phases_text(phases: dict[str, float]) -> str:
    """Phases that took a while, in the order in which they came."""
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= 0.05)


def error_of(told: dict[str, str]) -> K31Error:
    """The error that another process told of."""
    error = K31Error(told.get("what", "unknown"), told.get("where", ""), told.get("hint", ""))
    from k31compile.errors import all_errors

    kind = next((kind for kind in all_errors() if kind.code == told.get("code")), None)
    return kind(error.what, error.where, error.hint) if kind is not None else error


def _add(total: dict[str, float], more: dict[str, float]) -> None:
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds
