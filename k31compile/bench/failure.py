"""What failed, in one line: torch's own errors name the compiler in their first line and the reason in the next."""

from __future__ import annotations


def in_one_line(failure: Exception) -> str:
    """The kind of an error and the first line that tells something."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    told = lines[:1]
    if told and told[0].endswith(":"):
        told = lines[:2]
    return " ".join([f"{type(failure).__name__}:", *told]) if told else type(failure).__name__
