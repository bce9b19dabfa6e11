"""Every error that k31compile raises on purpose: one class each, with a stable code and a remedy.

The text of an error is always one line, ``K31-0xxx: what (where); do this``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class K31Error(Exception):
    """Anything that k31compile refuses or fails at; every other error here is one of these."""

    code: ClassVar[str] = "K31-0001"
    default_hint: ClassVar[str] = ""
    exit_code: ClassVar[int] = 1  # of a command that ends with it: 1 its work failed, 2 it was called wrongly

    def __init__(self, what: str, where: str = "", hint: str | None = None) -> None:
        # All three stay in args: an error raised in a worker process must survive being pickled.
        super().__init__(what, where, hint)
        self.what = what
        self.where = where
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        text = f"{self.code}: {self.what}"
        if self.where:
            text += f" ({self.where})"
        if self.hint:
            text += f"; {self.hint}"
        return " ".join(text.split())

    def to_dict(self) -> dict[str, str]:
        """Return the error as the ``--json`` output of a command shows it."""
        return {
            "code": self.code,
            "error": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "hint": self.hint,
        }


class OptionError(K31Error):
    """An option that does not exist, or a value that an option does not take."""

    code = "K31-0101"
    exit_code = 2
    default_hint = "see k31compile.Options for the options and what each takes"


class NotBuiltYetError(K31Error):
    """Something that the interface names and this version does not have yet."""

    code = "K31-0102"
    exit_code = 2
    default_hint = "leave it out"


class UsageError(K31Error):
    """A command that was called in a way that cannot work."""

    code = "K31-0103"
    exit_code = 2
    default_hint = "see --help"


class EntryError(K31Error):
    """An Entry whose parts do not fit together, or a factory that does not return one."""

    code = "K31-0104"
    exit_code = 2
    default_hint = "write Entry(name, model, args, kwargs, dynamic={path: {dim: (name, min, max)}})"


class MissingDependencyError(K31Error):
    """An optional package that a command or target needs is not installed."""

    code = "K31-0105"
    default_hint = "install the extra that brings it"


class CheckpointError(K31Error):
    """A checkpoint that is not where it should be, or whose files do not fit the model."""

    code = "K31-0106"
    default_hint = "git checkout examples/pico brings the trained one back; examples/train_pico.py makes it anew"


class CallError(K31Error):
    """An entry whose model fails when it is called as it is written, without any compiling."""

    code = "K31-0107"
    default_hint = "repair the model or the arguments of its Entry; --debug shows the traceback"


class WarmFileError(K31Error):
    """A file of what is to be warmed that cannot be read, or says something that nobody understands."""

    code = "K31-0108"
    exit_code = 2
    default_hint = "docs/warm.md shows a k31.toml with all that it may say"


class TraceError(K31Error):
    """A graph that could not be turned into functional ATen operators."""

    code = "K31-0201"
    default_hint = "the graph can run unfused with backend='inductor'; please report it with the model's code"


class BudgetError(TraceError):
    """A trace or a confirmation that would grow beyond its budget."""

    code = "K31-0202"
    default_hint = "move the unrolled loop into a function of its own, or shorten the traced length"


class PassError(K31Error):
    """A pass that is registered twice, orders itself after an unknown one, or closes a cycle."""

    code = "K31-0203"
    default_hint = "run `k31 passes` to see all passes and their order"


class InvariantError(K31Error):
    """A pass changed something that a pass must keep: shapes, types, strides, or the order of mutations."""

    code = "K31-0204"
    default_hint = "the pass was undone; leave its fusion out with options={'fuse': [...]}"


class ConfirmationError(K31Error):
    """A region that looks like a known operator and does not compute what that operator computes."""

    code = "K31-0205"
    default_hint = "the region was left as it was written"


class StrictError(K31Error):
    """Under strict=True: an undone pass, a fall-back, a reached recompile limit or a near miss."""

    code = "K31-0206"
    default_hint = "compile without strict to get a report of it instead"


class DocumentError(K31Error):
    """A graph that cannot be written down for another process, such as the one that builds it."""

    code = "K31-0207"
    default_hint = "compile it with codegen='inductor'"


class EquivalenceError(K31Error):
    """A function that was declared to be an operator and does not compute it, or cannot be looked into."""

    code = "K31-0208"
    default_hint = "nothing was declared; the function runs as it is written"


class ScheduleError(K31Error):
    """Tasks that cannot be scheduled as listed, or a schedule that leaves two of them unordered or waiting for ever."""

    code = "K31-0209"
    default_hint = "the operators can run one after the other on one stream; please report it with the schedule"


class BucketError(K31Error):
    """Sizes that no bucket holds, arguments that cannot be padded to one, or a call that no compiled graph served."""

    code = "K31-0210"
    default_hint = "give the buckets a larger maximum, or compile sizes beyond it with beyond='compile'"


class OperatorError(K31Error):
    """A k31 operator that was called with tensors which it does not take."""

    code = "K31-0301"
    default_hint = "see the operator's schema and reference in k31compile/kernels"


class BuildError(K31Error):
    """A kernel that could not be built on this machine."""

    code = "K31-0302"
    default_hint = "run `k31 doctor`; without a C++ compiler the reference implementations serve"


class CallRefusedError(K31Error):
    """A call of an artefact that is not one of those which it was compiled for."""

    code = "K31-0303"
    default_hint = "call it as it was compiled, or compile an entry for this call too"


class TargetError(K31Error):
    """A target that cannot take this graph, or is not available on this machine."""

    code = "K31-0401"
    default_hint = "choose another target with options={'target': 'cpu'}"


class NativeError(TargetError):
    """A graph that cannot be built to one library, or a library that does not load; the graph can run otherwise."""

    code = "K31-0402"
    default_hint = "the graph is compiled by Inductor in each process, or runs with options={'codegen': 'ops'}"


class StoreError(K31Error):
    """A folder or file of ours that is missing, not the user's own, or open to others."""

    code = "K31-0501"
    default_hint = "set K31_CACHE_DIR to a folder of your own with mode 0700"


class KeyingError(K31Error):
    """A graph that must not be kept: something that it does could change without its key changing."""

    code = "K31-0503"
    default_hint = "it is compiled in each process; the text names what cannot be seen from outside"


class ColdCompileError(K31Error):
    """A graph that had to be in the cache and is not; the text names the ingredient that differs."""

    code = "K31-0504"
    default_hint = "warm the cache with `k31 cache warm`, or allow compiling with require_warm=False"


class BundleError(K31Error):
    """A bundle that cannot be made, is damaged, too large, or not signed by whom this machine trusts."""

    code = "K31-0506"
    default_hint = "make it again with: k31 cache export BUNDLE"


class WarmError(K31Error):
    """A cache that is not warm after it was to be warmed, or found cold when it was only to be checked."""

    code = "K31-0507"
    default_hint = "the lines above say which entries, and why"


class WeightFileError(K31Error):
    """A file of weights that cannot be read or written, or whose recorded layout does not fit what is asked of it."""

    code = "K31-0502"
    default_hint = "k31 weights inspect PATH lists what a file holds and in which layout"


class ArtefactError(K31Error):
    """An artefact that cannot be made, is damaged, not to be trusted, or made for another machine or other weights."""

    code = "K31-0505"
    default_hint = "make it again with: k31 compile TARGET -o F.k31"


class CheckError(K31Error):
    """A compiled model whose results differ from the ones it was checked against."""

    code = "K31-0601"
    default_hint = "--all shows every stage before it; options={'fuse': [...]} leaves a fusion out"


class ContractError(K31Error):
    """A fusion that a contract promises and a graph did not get, or more memory than it allows."""

    code = "K31-0602"
    default_hint = "repair what the reason names; after a change that was meant: k31 explain TARGET --lock F"


class LockError(K31Error):
    """A file of a fusion contract that is missing, damaged, of another format, or of another model."""

    code = "K31-0603"
    exit_code = 2
    default_hint = "write one with: k31 explain TARGET --lock F"


class BenchError(K31Error):
    """A benchmark whose result is wrong, or a process of one that failed or took too long."""

    code = "K31-0604"
    default_hint = "nothing is timed that is wrong; --only NAME measures one case, --debug shows its traceback"


def all_errors() -> Iterator[type[K31Error]]:
    """Yield K31Error and every class derived from it, ordered by code."""

    def below(cls: type[K31Error]) -> Iterator[type[K31Error]]:
        yield cls
        for child in cls.__subclasses__():
            yield from below(child)

    yield from sorted(below(K31Error), key=lambda cls: cls.code)


def explain_code(code: str) -> str:
    """Return what an error code means and what to do about it; the code may be short, as in ``101``."""
    digits = code.upper().removeprefix("K31-").lstrip("0").zfill(4)
    for cls in all_errors():
        if cls.code == f"K31-{digits}":
            meaning = " ".join((cls.__doc__ or "").split())
            remedy = f" What to do: {cls.default_hint}." if cls.default_hint else ""
            return f"{cls.code} ({cls.__name__}): {meaning}{remedy}"
    known = ", ".join(cls.code for cls in all_errors())
    raise UsageError(f"there is no error code {code!r}", hint=f"known codes: {known}")
