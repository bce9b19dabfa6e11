"""What a graph is here: trace, data flow, the cuts that find a region, the runs that confirm it, the rewrite."""
