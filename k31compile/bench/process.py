"""A worker process: started with the environment of a run, asked for one thing at a time, ended with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from k31compile.bench.machine import KEEPING
from k31compile.errors import BenchError


def environment(threads: int, keep: bool = True) -> dict[str, str]:
    """The environment of a worker: so many threads, and a malloc that keeps large temporaries unless told otherwise."""
    made = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "K31_LOG": "error"}
    return {**made, **KEEPING} if keep else made


class Worker:
    """One process that answers tasks."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start it; `command` is what follows the interpreter."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by stop)
        # -P: the folder that one happens to stand in must not be imported from
        self._process = subprocess.Popen(
            [sys.executable, "-P", *command], env=dict(variables), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, start_new_session=True,
        )  # fmt: skip

    def ask(self, task: Mapping[str, Any], limit: float) -> Any:
        """The answer to a task.

        Raises:
            BenchError: it failed, the process ended, or `limit` seconds were over; after the last two it is stopped.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        over = threading.Event()

        def stop_late() -> None:
            over.set()
            self._kill()

        timer = threading.Timer(limit, stop_late)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(task), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self._process.wait()  # it has closed its output, so its end is near
            raise BenchError(f"stopped after {limit:.0f} s" if over.is_set() else self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer["answer"]

    def is_there(self) -> bool:
        """Whether the process can still be asked."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process and all that it started."""
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        code = self._process.returncode
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"the process ended with {code}: {lines[-1]}" if lines else f"the process ended with {code}"
