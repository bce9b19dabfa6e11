"""Tests that need torch_npu: `make test-ascend` runs them in a venv of its own, for it breaks `import torch`."""

import importlib.util
import os

# torch would load torch_npu by itself, and fail where there is no CANN.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

collect_ignore_glob = [] if importlib.util.find_spec("torch_npu") else ["test_*.py"]
