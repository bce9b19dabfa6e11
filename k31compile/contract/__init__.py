"""Fusion contracts: what a model got once, written down, and what it gets now held against it."""
