"""Functions before graphs: a Python function that computes a known operator is called, confirmed and kept whole.

`source` says what a function reads, `call` how it was called, `hypotheses` what it may be, `confirm` what it is;
`hook` puts the operator in its place while Dynamo traces for the backend k31, and for nobody else.
"""
