"""Where the ``k31`` command starts: it sets the environment before anything can import torch."""

from __future__ import annotations

from collections.abc import Sequence

from k31compile.cli import environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 1 when its work failed, or 2 when it was called wrongly."""
    environment.prepare()
    from k31compile.cli.app import run

    return run(argv)
