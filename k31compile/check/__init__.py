"""Check a compiled model stage by stage against float64: ``k31compile.check(entry)`` and ``k31 check``.

Every graph of a call runs three ways on the same inputs: as written in float64 (the gold), as written in its own
dtype (eager), and rewritten by k31. What k31 changes is right when its distance from the gold is about that of eager.
"""

from k31compile.check.result import CheckReport, Stage
from k31compile.check.run import check

__all__ = ["CheckReport", "Stage", "check"]
