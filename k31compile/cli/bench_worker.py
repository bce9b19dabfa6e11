"""The process in which ``k31 bench`` measures: answers tasks of the suite that it is started for."""

from __future__ import annotations

import sys

from k31compile.cli import environment, target


def main() -> None:
    """Serve the suite named on the command line until standard input ends."""
    environment.prepare()
    from k31compile.bench.worker import serve

    if sys.argv[1] == "operators":
        from k31compile.bench import operator_runs

        serve(operator_runs.answers())
    else:
        from k31compile.bench.model_worker import ModelWorker

        serve(ModelWorker(target.load_entries).answers())


if __name__ == "__main__":
    main()
