"""One column of the demo in a process of its own: build, generate, and measure when told to.

Talks in JSON lines: it gets its task as the first line of standard input, then "measure" as often as wanted; it
writes one event a line. A process of its own can be stopped in the middle of a build, and shares no compiler state.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from torch import Tensor

    from k31compile.cli.demo_ties import TieCounter
    from k31compile.model import Caches, K31Config, K31ForCausalLM

CHUNK = 48
"""Tokens of a prefill call."""

BACKENDS: dict[str, dict[str, Any] | None] = {
    "k31": {"backend": "k31", "options": {"codegen": "ops"}},
    "eager": None,
    "inductor": {"backend": "inductor"},
    "k31-built": {"backend": "k31", "options": {"codegen": "inductor"}},
}
"""Column -> what it gives to torch.compile; None runs the model as written."""


def main() -> None:
    """Serve one column until standard input ends."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints must not garble the events
    task = json.loads(sys.stdin.readline())
    column = _Column(task, events)
    column.build()
    for line in sys.stdin:
        if line.strip() == "measure":
            column.measure()


def demo_model(name: str) -> tuple[K31ForCausalLM, K31Config, str]:
    """Return the demo's model, its config and a sentence that says what it is."""
    from k31compile.cli.entries import build_model
    from k31compile.model import CONFIGS, K31ForCausalLM, count_parameters

    if name == "pico":
        model, config = build_model("pico")
        return model, config, f"pico, trained on Python source, {count_parameters(model) / 1e6:.2f} M parameters"
    config = CONFIGS[name]()
    what = f"{name}, weights from a seed (untrained: it writes gibberish)"
    if name == "tiny":
        # With 4 heads all of them are often 0 for many keys, and which of equal keys torch.topk takes is open.
        config = config.replace(index_n_heads=16)
        what = f"{name} with 16 index heads, weights from a seed (untrained: it writes gibberish)"
    model = K31ForCausalLM(config).eval()
    return model, config, f"{what}, {count_parameters(model) / 1e6:.2f} M parameters"


class _Column:
    def __init__(self, task: dict[str, Any], events: TextIO) -> None:
        self.task, self.events = task, events
        self.start = time.perf_counter()

    def build(self) -> None:
        """Compile and generate once; the compiler's cost is in this first run."""
        import torch

        from k31compile.cli.demo_ties import TieCounter

        model, config, what = demo_model(self.task["model"])
        settings = BACKENDS[self.task["column"]]
        self.config = config
        self.caches = self._allocate(config)
        self.function: Callable[..., Tensor] = model
        if settings is not None:
            self.function = torch.compile(model, dynamic=False, **settings)
        ties = TieCounter(config.index_topk) if settings is None else None
        self.say("step", text="building the prefill graph" if settings else "reading the prompt")
        begin = time.perf_counter()
        tokens, margins, first = self._first_run(ties)
        self.say(
            "built",
            seconds=time.perf_counter() - begin,
            first_token=first - begin,
            tokens=tokens,
            margins=margins,
            model=what,
            graphs=_graphs(self.task["column"]),
            report=_report(),
            cached=_from_cache(),
            ties=None if ties is None else [ties.tied, ties.rows],
            threads=torch.get_num_threads(),
        )

    def measure(self) -> None:
        """Generate once more and say how long the prompt and each further token took."""
        stamps: list[float] = []
        begin = time.perf_counter()
        tokens = self._generate(self.function, lambda _request, _token: stamps.append(time.perf_counter()))
        decode = (stamps[-1] - stamps[0]) / max(1, len(stamps) - 1)
        self.say("measured", prefill=stamps[0] - begin, decode=decode, tokens=tokens)

    def say(self, event: str, **data: Any) -> None:
        """Write one event."""
        print(json.dumps({"event": event, **data}), file=self.events)

    def _allocate(self, config: K31Config) -> Caches:
        from k31compile.model import Caches

        return Caches.allocate(config, 1, len(self.task["prompt"]) + self.task["tokens"])

    def _first_run(self, ties: TieCounter | None) -> tuple[list[int], list[float], float]:
        import contextlib

        margins: list[float] = []
        stamps: list[float] = []

        def watched(*args: Any) -> Tensor:
            with ties or contextlib.nullcontext():
                logits = self.function(*args)
            best = logits[0, -1].topk(2).values
            if args[0].shape[1] == 1:
                margins.append(float(best[0] - best[1]))
            return logits

        def on_token(_request: int, _token: int) -> None:
            stamps.append(time.perf_counter())
            if len(stamps) == 1 and self.task["column"] != "eager":
                self.say("step", text=f"first token after {stamps[0] - begin:.1f} s, building the decode graph")
            if len(stamps) == 2:
                self.say("step", text="generating")

        begin = time.perf_counter()
        tokens = self._generate(watched, on_token)
        return tokens, margins, stamps[0]

    def _generate(self, function: Callable[..., Tensor], on_token: Callable[[int, int], None]) -> list[int]:
        from k31compile.model import generate

        task = self.task
        return generate(
            function,
            [task["prompt"]],
            task["tokens"],
            chunk=CHUNK,
            caches=self.caches,
            config=self.config,
            on_token=on_token,
        )[0]


def _graphs(column: str) -> int:
    """How many graphs were compiled: by k31's reports, or by Dynamo's own count."""
    import torch

    from k31compile.report import reports

    if column == "eager":
        return 0
    if column.startswith("k31"):
        return len(reports())
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _from_cache() -> bool:
    """Whether Inductor took any graph from what an earlier run has left: then the first run says little of its cost."""
    import torch

    return bool(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])


def _report() -> dict[str, Any] | None:
    from k31compile.report import Report, reports

    return Report.merge(reports()).to_dict() if reports() else None


if __name__ == "__main__":
    main()
