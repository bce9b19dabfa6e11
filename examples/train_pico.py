"""Train pico, a K3.1 of 2.6 M parameters, on the source text of the Python standard library; no download.

    pip install -e ".[examples]"             # matplotlib, for the curve
    python examples/train_pico.py            # about half an hour on two cores; again after a kill: it goes on
    python examples/train_pico.py --measure  # measure the checkpoint again and rewrite its model card

The result is a folder with sharded safetensors, config.json, the loss curve and a model card (examples/pico).
"""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from pico_training import card
from pico_training.corpus import Corpus, held_out_rows, read_corpus
from pico_training.evaluation import bits_per_byte, measure
from pico_training.recipe import CONFIG, Recipe, for_training
from pico_training.run_state import RunState, StateError
from pico_training.trainer import Trainer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from k31compile.model import K31ForCausalLM, load_config, load_weights, save_weights

HERE = Path(__file__).parent
WORK = HERE.parent / "build" / "pico"
# glibc hands every large temporary back to the system and fetches it anew unless told otherwise before the start:
# a fifth of the time.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "500000000",
}
SHARD_BYTES = 3 * 2**20
SAVE_SECONDS, EVALUATE_STEPS, EVALUATE_WINDOWS, MEASURE_WINDOWS = 30.0, 200, 32, 256


def train(
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint and its card.")] = HERE / "pico",
    work: Annotated[Path, typer.Option(help="Folder of the state that a killed run goes on from.")] = WORK,
    steps: Annotated[int, typer.Option(min=1, help="Steps of four rows of 512 bytes.")] = Recipe.steps,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = Recipe.seed,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever lies in the work folder.")] = False,
    only_measure: Annotated[bool, typer.Option("--measure", help="Do not train; measure what lies in --out.")] = False,
) -> None:
    """Train pico, or go on where a killed run was; then measure it and write its card."""
    corpus = read_corpus()
    if not only_measure:
        state = RunState(work / "state.pt", Trainer(Recipe(steps=steps, seed=seed), CONFIG, corpus))
        if not fresh:
            state.take_up()
        run(state, corpus)
        out.mkdir(parents=True, exist_ok=True)
        save_weights(state.trainer.for_serving(), out, max_shard_bytes=SHARD_BYTES)
        card.write_training(out, state, corpus)
    describe(out, corpus)


def run(state: RunState, corpus: Corpus) -> None:
    """Train to the end, with a bar; saves often enough to lose half a minute at most."""
    trainer = state.trainer
    sample = held_out_rows(corpus, trainer.recipe.context, EVALUATE_WINDOWS)
    with bar("{task.fields[bits]}") as progress:
        task = progress.add_task("training", total=trainer.total_steps, completed=trainer.step, bits=state.summary())
        saved = begin = time.monotonic()
        while trainer.step < trainer.total_steps:
            state.record(trainer.advance())
            if trainer.step % EVALUATE_STEPS == 0 or trainer.step == trainer.total_steps:
                state.record_held_out(bits_per_byte(trainer.model, sample, state.selection))
                # not only in the bar, which is not drawn where output goes to a file
                place = f"step {trainer.step} of {trainer.total_steps}, {state.seconds / 60:.1f} min"
                progress.print(f"{place}, {state.summary()}")
            now = time.monotonic()
            state.seconds, begin = state.seconds + now - begin, now
            progress.update(task, completed=trainer.step, bits=state.summary())
            if now - saved > SAVE_SECONDS or trainer.step == trainer.total_steps:
                state.save()
                saved = now


def describe(out: Path, corpus: Corpus) -> None:
    """Measure the checkpoint as it was written, and write its card and the curve."""
    model = K31ForCausalLM(for_training(load_config(out)))
    load_weights(model, out)
    with bar("{task.description}") as progress:
        task = progress.add_task("measuring", total=card.NUM_MEASUREMENTS)

        def tick(what: str) -> None:
            progress.update(task, advance=1, description=what)

        card.write(out, measure(model.eval(), held_out_rows(corpus, Recipe.context, MEASURE_WINDOWS), tick), corpus)
    print(f"{out / 'README.md'} is written")


def bar(text: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn(text),
    )


if __name__ == "__main__":
    if not os.environ.keys() >= KEEP_MEMORY.keys():
        os.environ.update(KEEP_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    try:
        typer.run(train)
    except StateError as error:
        raise SystemExit(f"train_pico: {error}") from None
