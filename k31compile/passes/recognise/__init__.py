"""Reading strangers' code: recognisers on the shared engine of `k31compile.graph`, one file an operator."""
