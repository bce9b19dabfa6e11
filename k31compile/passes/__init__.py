"""Passes: graph to graph, one file each; `pipeline.py` orders and runs them."""

if not __name__.startswith("k31compile."):
    raise ImportError(f"import k31compile.passes instead of {__name__}: the folder link is for reading only")
