"""Print what became of every stranger: `python run.py [--name part]...`."""

from __future__ import annotations

import sys
import time
import traceback

import attn_residuals
import expert_blocks
import gated_delta
import gated_norms
import indexers
import kda_chunks
import kda_steps
import plain_weights
import routers
import short_convs
import sparse_attentions
from stranger import TOLERANCE, Stranger, measure

FILES = (
    kda_steps, gated_delta, short_convs, gated_norms, indexers, sparse_attentions,
    routers, expert_blocks, attn_residuals, kda_chunks, plain_weights,
)  # fmt: skip


def all_strangers() -> list[tuple[str, Stranger]]:
    """Return every stranger with the name of its file."""
    return [(file.__name__, stranger) for file in FILES for stranger in file.STRANGERS]


def main(parts: list[str]) -> int:
    """Print a line a stranger and return 1 where numbers differ."""
    wrong = 0
    for file, stranger in all_strangers():
        name = f"{file}.{stranger.name}"
        if parts and not any(part in name for part in parts):
            continue
        start = time.process_time()
        try:
            outcome = measure(stranger)
        except Exception:  # a table must show the others too
            print(f"{name:36} CRASH {traceback.format_exc(limit=-4)}")
            wrong += 1
            continue
        state = "ok" if outcome.complete else "NOT FUSED"
        wrong += outcome.worst > TOLERANCE
        print(
            f"{name:36} {state:9} {outcome.worst:8.1e}{' WRONG' if outcome.worst > TOLERANCE else ''} "
            f"{time.process_time() - start:5.1f}s  expected {outcome.expected} fused {outcome.fused}",
            flush=True,
        )
        if not outcome.complete:
            for line in outcome.refused:
                print("      ", line)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
