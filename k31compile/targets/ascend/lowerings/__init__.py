"""What each k31 operator becomes on an NPU: an operator of torch_npu where its constraints hold, else plain formulas.

Formulas are functional (no copy into a result), so that every part has a GE converter; tests hold them to the
operators' references.
"""

from k31compile.targets.ascend.lowerings import attention, delta_rule, depth, experts, norms  # noqa: F401
