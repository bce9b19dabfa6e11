"""The two Ascend products that graphs are lowered for, as torch_npu and torchair ask for them."""

from dataclasses import dataclass, replace

from k31compile.errors import OptionError


@dataclass(frozen=True)
class Profile:
    """One product.

    Attributes:
        name: the option `target`.
        soc_name: what the driver calls the chip.
        soc_family: how the names of all chips begin that graphs for this one are made for.
        soc_version: torch_npu's number of it; meta functions and converters branch on it.
        cann: the CANN version that graphs are made for.
        super_kernels: whether GE merges operators of one scope into a kernel (documented for A2 and A3 alone).
        path: "ge" for a GE graph, which runs what has a converter; "npugraph_ex" for one that runs any operator.
        may_round: whether an operator may be given or give bfloat16 where the model computes in float32.
        own_operators: operators of ours that a custom-op package on the device provides (own_operators.py).

    """

    name: str
    soc_name: str
    soc_family: str
    soc_version: int
    cann: str
    super_kernels: bool
    path: str = "ge"
    may_round: bool = False
    own_operators: frozenset[str] = frozenset()


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("ascend-a3", "Ascend910_9391", "Ascend910_93", 250, "9.1.0", super_kernels=True),
        Profile("ascend-950", "Ascend950PR", "Ascend950", 260, "9.1.0", super_kernels=False),
    )
}


# What a lowered graph can be made into, the first by default.
MODES = ("ge", "npugraph_ex")


def profile_of(target: str, mode: str = "") -> Profile:
    """The profile of a target, for graphs of a mode; both modes are for both products.

    Raises:
        OptionError: it is not an Ascend target, or there is no such mode.
    """
    if target not in PROFILES:
        raise OptionError(f"there is no Ascend target {target!r}", hint=f"targets: {', '.join(PROFILES)}")
    if mode and mode not in MODES:
        raise OptionError(f"there is no mode {mode!r}", where=target, hint=f"modes: {', '.join(MODES)}")
    return replace(PROFILES[target], path=mode) if mode else PROFILES[target]
