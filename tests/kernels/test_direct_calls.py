"""Calls that the built library serves without Python: the same bits and the same refusals, and who served them."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from drawn_calls import OPERATORS, Draw, spoil

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.kernels.cpu import compile_units, loader
from k31compile.kernels.cpu.direct_calls import count_calls

ROOT = Path(__file__).parents[2]
DRAWN = 60
SPOILT = 250


@pytest.fixture(autouse=True)
def _taken_over():
    usable, why = loader.available()
    if not usable or count_calls("lightning_indexer") is None:
        pytest.skip(why)


def outcome(run, arguments, options):
    """What a call gives, or the type and text of its refusal."""
    try:
        given = run(*arguments, **options)
    except Exception as error:
        return type(error), str(error)
    return [given] if isinstance(given, torch.Tensor) else list(given)


def same(one, other):
    if isinstance(one, tuple) or isinstance(other, tuple):
        return one == other
    return len(one) == len(other) and all(
        (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def told(given):
    return given if isinstance(given, tuple) else [(tensor.dtype, tensor.shape) for tensor in given]


def through_python(name):
    return kernels.OPERATORS[name].run


def called(name):
    return getattr(torch.ops.k31, name)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_same_bits_as_through_python(name):
    before = count_calls(name)
    for seed in range(DRAWN):
        call = OPERATORS[name](Draw(seed))
        direct, detour = outcome(called(name), *call), outcome(through_python(name), *call)
        assert isinstance(detour, list), f"seed {seed}: {detour}"
        assert same(direct, detour), f"seed {seed}"
    served, passed_on = (now - then for now, then in zip(count_calls(name), before, strict=True))
    assert served + passed_on == DRAWN
    assert served > DRAWN / 3, f"{served} of {DRAWN} calls were served"


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_wrong_is_refused_as_through_python(name):
    refused = 0
    for seed in range(SPOILT):
        draw = Draw(seed)
        call = spoil(draw, *OPERATORS[name](draw))
        detour = outcome(through_python(name), *call)
        direct = outcome(called(name), *call)
        if isinstance(detour, tuple) and not issubclass(detour[0], OperatorError):
            # Torch's schema refuses such an argument before any of us sees it, in its own words.
            assert isinstance(direct, tuple), f"seed {seed}: {detour}"
            continue
        refused += isinstance(detour, tuple)
        assert same(direct, detour), f"seed {seed}: {told(direct)}; through Python {told(detour)}"
    assert refused > SPOILT / 5, f"{refused} of {SPOILT} calls were refused"
