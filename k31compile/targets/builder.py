"""The parent's side of the child that builds graphs: one child at a time, jobs in their order, nothing waits for it."""

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31compile.errors import DocumentError
from k31compile.targets.unfinished import remove_unfinished_builds

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from k31compile.targets.build_process import main; "
_BOOT += "main(sys.argv[2], int(sys.argv[3]))"


@dataclass
class Job:
    """One graph to be built: a number, where it lies, and the child's answer once there is one."""

    number: int
    path: Path
    answer: Mapping[str, Any] | None = None

    @property
    def built(self) -> Path:
        """Where the child puts what it built."""
        return self.path.with_suffix(".built")


class Builder:
    """A queue of graphs and the child process that works on them.

    No thread and no fork of this process: answers are read when somebody looks. The child is another interpreter, in a
    process group of its own, and ends with this process. In a fork of this process nothing is ever built.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._waiting: dict[int, Job] = {}
        self._count = 0
        self._spool: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._read = b""
        self._caches: set[Path] = set()

    def submit(self, document: Mapping[str, Any]) -> Job:
        """Queue a graph, and start the child if there is none.

        Raises:
            DocumentError: this process was forked from the one that has the child.
        """
        if os.getpid() != self._owner:
            raise DocumentError("this process is a fork of the one that builds", hint="compile after forking")
        with self._lock:
            if self._spool is None:
                self._spool = Path(tempfile.mkdtemp(prefix="k31-tiered-"))
                atexit.register(self.stop)
            self._count += 1
            self._caches.add(Path(document["state"]["cache"]))
            job = Job(self._count, self._spool / f"{self._count}.json")
            job.path.write_text(json.dumps(document), encoding="utf-8")
            self._waiting[job.number] = job
            if self._child is None:
                self._start()
            else:
                self._send(job)
            return job

    def look(self) -> None:
        """Take what the child has answered meanwhile; costs a system call and never waits."""
        if os.getpid() != self._owner or not self._lock.acquire(blocking=False):
            return
        try:
            if self._child is not None and self._waiting:
                self._take_answers(self._child)
        finally:
            self._lock.release()

    def stop(self) -> None:
        """End the child and all that it started, and remove what lies between the two processes."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._child is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._child.pid, signal.SIGKILL)
                self._forget_child(self._child)
                for cache in self._caches:
                    remove_unfinished_builds(cache)
            for job in self._waiting.values():
                job.answer = {"error": "the process that builds was stopped"}
            self._waiting.clear()
            if self._spool is not None:
                shutil.rmtree(self._spool, ignore_errors=True)
                self._spool = None

    def _start(self) -> None:
        path = json.dumps([entry for entry in sys.path if entry])
        command = [sys.executable, "-P", "-c", _BOOT, path, str(self._spool), str(os.getpid())]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._read = b""
        for job in self._waiting.values():
            self._send(job)

    def _send(self, job: Job) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        line = json.dumps({"job": job.number, "path": str(job.path)}) + "\n"
        # A child that is gone is noticed at the next look, and its jobs go to another one.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._child.stdin.fileno(), line.encode())

    def _take_answers(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        poll = select.poll()
        poll.register(child.stdout, select.POLLIN | select.POLLHUP)
        while poll.poll(0):
            read = os.read(child.stdout.fileno(), 1 << 16)
            if not read:
                if child.poll() is not None:
                    self._replace(child)
                return
            *lines, self._read = (self._read + read).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                self._waiting.pop(answer["job"]).answer = answer

    def _replace(self, child: subprocess.Popen[bytes]) -> None:
        """The child has ended: by itself for want of work, or in the midst of its first job."""
        code = self._forget_child(child)
        if code:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            first = self._waiting.pop(next(iter(self._waiting)))
            first.answer = {"error": f"the process that builds ended with {how}"}
        if self._waiting:
            self._start()

    def _forget_child(self, child: subprocess.Popen[bytes]) -> int:
        code = child.wait()  # it has ended, or was killed
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._child = None
        return code


BUILDER = Builder()
"""The one builder of this process."""
