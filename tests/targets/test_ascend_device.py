"""An Ascend target on a machine without torch_npu: one sentence, and nothing was compiled in its place."""

import importlib.util

import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_without_torch_npu_the_error_says_what_to_do():
    torch._dynamo.reset()
    model = torch.nn.Linear(16, 16)
    call = torch.compile(model, backend="k31", options={"target": "ascend-950"})
    with torch.no_grad(), pytest.raises(Exception, match=r"ascend-950 needs torch_npu.*--target ascend-950 --offline"):
        call(torch.zeros(2, 16))
