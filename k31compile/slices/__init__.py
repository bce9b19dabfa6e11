"""Slices of a function: the statements around a loop over data, called, confirmed and replaced by one operator.

A loop over experts fetches their tokens by `torch.where(indices == i)`: shapes depend on the data, and Dynamo gives the
whole function up. `cut` finds the statements in the function's source, `held` what they read (modules too), `confirm`
what they compute; `hook` puts the operator in their place while Dynamo traces for the backend k31, and for nobody else.
"""
