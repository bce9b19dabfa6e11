"""``python -m k31compile`` is the ``k31`` command."""

from __future__ import annotations

import sys

from k31compile.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
