"""The fused graph of a call as an ONNX model: each k31 operator a function of domain `k31` over standard operators.

`libraries` asks for onnx and its companions, `formulas` says what a function computes, `functions` makes one for each
kind of call, `program` is the graph that torch.onnx translates, `names` and `export` put the model together, `check`
runs it with onnxruntime beside eager. Nothing here is imported unless somebody exports.
"""
