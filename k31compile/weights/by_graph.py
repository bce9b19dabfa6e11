"""Which tensors become blocks, decided by the graphs of a model: there it is seen who reads each parameter."""

from collections.abc import Iterable, Sequence

from torch import nn

from k31compile.backend import captured_graph
from k31compile.entry import Entry
from k31compile.errors import EntryError, WeightFileError
from k31compile.passes.layout.nz_weights import NzDecision, decide_nz_weights
from k31compile.targets.ascend.profiles import profile_of
from k31compile.weights.record import TensorRecord
from k31compile.weights.rules import Choice, Choose, impossible


def rule_of(entries: Sequence[Entry], product: str, names: Iterable[str]) -> Choose:
    """A rule for the tensors of a checkpoint by the graphs of a model's entries; each must agree on a weight.

    Raises:
        OptionError: there is no such product.
        TraceError: a call of an entry is not one graph.
        WeightFileError: no tensor of the checkpoint is a parameter of the model.
    """
    product = profile_of(product).name
    decisions: dict[str, NzDecision] = {}
    for entry in entries:
        for name, found in decisions_of(entry, product).items():
            if decisions.setdefault(name, found).is_nz:
                decisions[name] = found
    model = ", ".join(dict.fromkeys(entry.name for entry in entries))
    known = {name for entry in entries for name in dict(_module(entry).named_parameters(remove_duplicate=False))}
    if not known & set(names):
        raise WeightFileError(
            f"none of its tensors is a parameter of {model}",
            hint=f"parameters are called {', '.join(sorted(known)[:3])}",
        )

    def choose(name: str, record: TensorRecord) -> Choice:
        if reason := impossible(record):
            return Choice(False, reason)
        found = decisions.get(name)
        if found is None:
            reader = "no product" if name in known else "no graph"
            return Choice(False, f"{reader} of {model} reads it")
        if found.shape != record.shape:
            return Choice(False, f"{model} has it as {list(found.shape)}")
        return Choice(found.is_nz, found.reason, found.remedy)

    return choose


def decisions_of(entry: Entry, product: str) -> dict[str, NzDecision]:
    """The decision on each weight that a product of an entry's graph reads, by all names of the parameter."""
    names = names_of(_module(entry))
    with entry.grad_mode():
        module, tensors = captured_graph(entry.model, entry.args, entry.kwargs, "cpu")
    inputs = module.graph.find_nodes(op="placeholder")
    parameters = [position for position, node in enumerate(inputs) if node.meta.get("is_parameter", False)]
    found = decide_nz_weights(module.graph, parameters, product, tensors)
    return {name: one for one in found for name in names.get(id(tensors[one.position]), ())}


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its identity."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _module(entry: Entry) -> nn.Module:
    if not isinstance(entry.model, nn.Module):
        raise EntryError("its model is a function, which has no parameters", where=f"entry {entry.name!r}")
    return entry.model
