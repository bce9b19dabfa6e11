"""Weights on disk and in memory in the layout that a target reads: conversion of files, loading, one cast on Ascend."""

from k31compile.weights.convert import convert as convert
from k31compile.weights.load import load as load

__all__ = ["convert", "load"]
