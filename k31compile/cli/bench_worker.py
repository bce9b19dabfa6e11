"""The process in which ``k31 bench`` measures: answers tasks of the suite that it is started for."""

from __future__ import annotations

import sys

from k31compile.cli import environment


def main() -> None:
    """Serve the suite named on the command line until standard input ends."""
    environment.prepare()
    from k31compile.bench import operator_runs
    from k31compile.bench.worker import serve

    suites = {"operators": operator_runs.answers}
    serve(suites[sys.argv[1]]())


if __name__ == "__main__":
    main()
