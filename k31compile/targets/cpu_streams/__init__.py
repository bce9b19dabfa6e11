"""A schedule run on the CPU: a thread for each stream, real events, and one compiled call for each super kernel."""
