"""Whole models: K3.1 at the size `mini`, transformers' kimi_linear, and a step of many tiny layers."""

from k31compile.bench.models import deep, kimi, mini
from k31compile.bench.models.case import ModelCase


def model_cases() -> list[ModelCase]:
    """All cases of the suite, in the order of the table."""
    return [*mini.cases(), *kimi.cases(), *deep.cases()]
