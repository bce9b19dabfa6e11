"""The operators at K3.1's sizes, each against the plain PyTorch that it replaces."""

from k31compile.bench.case import Case
from k31compile.bench.operators import attention, delta, depth, experts, indexer, linear, mega


def operator_cases() -> list[Case]:
    """All cases of the suite, in the order of the table."""
    modules = (indexer, attention, delta, mega, depth, experts, linear)
    return [case for module in modules for case in module.cases()]
