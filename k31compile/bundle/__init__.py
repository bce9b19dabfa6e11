"""Bundles: one signed file with compiled graphs, kernels and what was confirmed, for another machine's cache."""
