"""Schedules that are run: their graph cut into units, on the CPU with a thread for each stream and real events."""
