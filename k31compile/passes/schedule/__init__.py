"""Passes that prepare or make a schedule: they move and label nodes and leave what is computed as it is."""
