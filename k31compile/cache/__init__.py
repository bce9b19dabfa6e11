"""What compiled graphs leave behind: keys, the store, signatures, bundles and ahead-of-time artefacts.

`entry_store` keeps graphs under keys and hands them out after checking them. `opened` says
which store an option means, and `remote` puts one at a URL behind it.
"""

from __future__ import annotations

if not __name__.startswith("k31compile."):
    raise ImportError(f"import k31compile.cache instead of {__name__}: a second copy of it would be made")
