"""A run on disk: what a killed run needs to go on exactly where it was, and what the model card tells of it."""

import dataclasses
import os
import pickle
from pathlib import Path

import torch

from pico_training.trainer import Trainer

SMOOTH = 0.95


class StateError(Exception):
    """A state that does not fit this run; the message says what to do."""


class RunState:
    """A trainer, its history and its place on disk.

    losses holds what `Trainer.advance` returned, step by step; held_out pairs of step and bits per byte; seconds is
    the time spent in training, over all runs that contributed.
    """

    def __init__(self, path: Path, trainer: Trainer) -> None:
        self.path, self.trainer = path, trainer
        self.losses: list[dict[str, float]] = []
        self.held_out: list[tuple[int, float]] = []
        self.seconds = 0.0

    @property
    def identity(self) -> dict[str, object]:
        """What must agree for a state to be taken up: the recipe, the model and the text."""
        trainer = self.trainer
        return {
            **dataclasses.asdict(trainer.recipe),
            **dataclasses.asdict(trainer.model.config),
            "text": trainer.corpus.digest,
        }

    def record(self, losses: dict[str, float]) -> None:
        """Keep the losses of one step; a number that is not finite ends the run."""
        bad = [name for name, value in losses.items() if not value < float("inf")]
        if bad:
            raise StateError(
                f"step {self.trainer.step}: {', '.join(bad)} is not finite; {self.path} holds the last good state"
            )
        self.losses.append(losses)

    @property
    def selection(self) -> str:
        """What attention reads now, as evaluation names it."""
        return "indexer" if self.trainer.recipe.is_sparse(self.trainer.step) else "dense"

    def record_held_out(self, bits: float) -> None:
        """Keep a measurement of the held-out text at this step."""
        self.held_out.append((self.trainer.step, bits))

    def summary(self) -> str:
        """Bits per byte of the training text, smoothed, and of the last held-out measurement."""
        if not self.losses:
            return "bits per byte: -"
        recent = [losses["bits_per_byte"] for losses in self.losses[-60:]]
        weights = [SMOOTH**age for age in range(len(recent))][::-1]
        smooth = sum(w * bits for w, bits in zip(weights, recent, strict=True)) / sum(weights)
        held = f", held out {self.held_out[-1][1]:.3f}" if self.held_out else ""
        return f"bits per byte: {smooth:.3f}{held}"

    def save(self) -> None:
        """Write the state; the file appears whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        history = {"losses": self.losses, "held_out": self.held_out, "seconds": self.seconds}
        torch.save({"identity": self.identity, "trainer": self.trainer.state_dict(), "history": history}, partial)
        partial.replace(self.path)

    def take_up(self) -> bool:
        """Go on from the file if there is one; a state of another run, or a damaged one, is refused by name."""
        if not self.path.exists():
            return False
        try:
            held = torch.load(self.path, weights_only=True)
            identity, trainer, history = held["identity"], held["trainer"], held["history"]
        except (RuntimeError, EOFError, OSError, KeyError, TypeError, pickle.UnpicklingError) as cause:
            raise StateError(f"{self.path} is no state of a run ({cause}): --fresh begins anew") from None
        other = sorted(name for name, value in self.identity.items() if identity.get(name) != value)
        if other:
            raise StateError(f"{self.path} is of a run with another {', '.join(other)}: --fresh begins anew")
        self.trainer.load_state_dict(trainer)
        self.losses, self.seconds = list(history["losses"]), history["seconds"]
        self.held_out = [tuple(pair) for pair in history["held_out"]]
        return True
