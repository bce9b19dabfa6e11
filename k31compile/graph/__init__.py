"""What a graph is here: its trace, its data flow, the cuts that find a region, the runs that confirm it, the rewrite."""
