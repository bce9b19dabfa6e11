"""Targets ascend-a3 and ascend-950: a graph of k31 operators becomes one of torch_npu's, with streams and layouts.

Nothing here imports torch_npu until a graph is lowered; without a device `offline` converts and never runs.
"""
