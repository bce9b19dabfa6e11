"""What each k31 operator becomes on an NPU: an operator of torch_npu where its constraints hold, else plain formulas.

Formulas are functional (no copy into a result), so that every part has a GE converter; tests hold them to the
operators' references.
"""

import k31compile.targets.ascend.lowerings.attention
import k31compile.targets.ascend.lowerings.delta_chunk
import k31compile.targets.ascend.lowerings.delta_providers
import k31compile.targets.ascend.lowerings.delta_rule
import k31compile.targets.ascend.lowerings.depth
import k31compile.targets.ascend.lowerings.experts
import k31compile.targets.ascend.lowerings.norms  # noqa: F401
