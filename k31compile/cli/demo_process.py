"""The demo's side of a column: start its process, wait with progress, stop it at its limit."""

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from k31compile.errors import K31Error

_BEAT = 0.5


@dataclass
class ColumnProcess:
    """A running column; `built` is what it said when it had generated once, `why` why it is not there."""

    name: str
    task: dict[str, Any]
    built: dict[str, Any] | None = None
    why: str = ""
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    repeats: bool = True

    def start(self) -> None:
        """Start the process and give it its task."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by stop)
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        # -P: the folder that one happens to stand in must not be imported from
        command = [sys.executable, "-P", "-c", "from k31compile.cli.demo_column import main; main()"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self._tell(json.dumps({**self.task, "column": self.name}))

    def build(self, limit: float, tick: Callable[[str], None]) -> None:
        """Wait until it has generated once; a column that is not there by `limit` seconds is stopped."""
        self.start()
        self.built = self._wait_for("built", limit, tick)

    def measure(self, tick: Callable[[str], None], counts: bool = True) -> None:
        """Have it generate once more and, where it counts, keep the times."""
        assert self.built is not None
        self._tell("measure")
        done = self._wait_for("measured", 600, tick)
        if done is None:
            raise K31Error(f"the column {self.name} stopped while it was measured: {self.why}")
        if counts:
            self.prefill.append(done["prefill"])
            self.decode.append(done["decode"])
        self.repeats = self.repeats and done["tokens"] == self.built["tokens"]

    def stop(self) -> None:
        """End the process and all that it started."""
        if getattr(self, "_process", None) is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _wait_for(self, wanted: str, limit: float, tick: Callable[[str], None]) -> dict[str, Any] | None:
        end, text = time.monotonic() + limit, "starting"
        tick(text)
        while time.monotonic() < end:
            try:
                event = self._events.get(timeout=_BEAT)
            except queue.Empty:
                tick(text)
                continue
            if event is None:
                self.why = self._last_words()
                return None
            if event["event"] == wanted:
                return event
            text = event.get("text", text)
            tick(text)
        self.why = f"stopped after {limit:.0f} s, while {text} (--limit)"
        self.stop()
        return None

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self._process.stdin, flush=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                self._events.put(json.loads(line))
        self._events.put(None)

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"ended with exit code {self._process.returncode}"
