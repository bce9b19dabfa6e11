"""Layouts: static widths, memory formats of weights."""
