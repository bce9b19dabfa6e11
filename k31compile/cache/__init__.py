"""What compiled graphs leave behind: keys, the store, signatures, bundles and ahead-of-time artefacts.

Nothing of it is here yet. Until it is, a graph is kept only as far as Inductor's own caches keep it, and
the options and commands that need more are refused as not built yet.
"""

from __future__ import annotations

if not __name__.startswith("k31compile."):
    raise ImportError(f"import k31compile.cache instead of {__name__}: a second copy of it would be made")
