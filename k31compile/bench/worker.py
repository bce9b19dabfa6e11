"""The side of a benchmark in a process of its own: takes tasks as JSON lines and answers each with one line."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from k31compile.bench.failure import in_one_line

Task = Mapping[str, Any]
Answers = Mapping[str, Callable[[Task], Any]]
"""What each kind of task is answered with: a JSON value."""


def serve(answers: Answers) -> None:
    """Answer tasks from standard input until it ends. Whatever is printed meanwhile goes to standard error."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        _answer(json.loads(line), answers, out)


def _answer(task: Task, answers: Answers, out: TextIO) -> None:
    try:
        answer = {"answer": answers[task["task"]](task)}
    except Exception as error:  # a case that fails is told, and the next one may work
        traceback.print_exc()
        answer = {"error": in_one_line(error)}
    print(json.dumps(answer), file=out, flush=True)
