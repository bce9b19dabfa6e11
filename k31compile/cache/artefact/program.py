"""One entry of an artefact: its promise, checked at each call, and the library that computes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from k31compile.cache.artefact import conditions
from k31compile.cache.artefact.arguments import Matcher
from k31compile.cache.artefact.flags import check_flags
from k31compile.cache.artefact.results import TENSORS, Maker, places_of, result_maker
from k31compile.cache.artefact.sharing import SharingCheck
from k31compile.cache.artefact.signature import bind, signature_from
from k31compile.cache.artefact.tensors import ALL_TENSORS_FIT, Mismatch, TensorCheck, TensorPromise
from k31compile.targets.native.load import load_native


class Program:
    """An entry that is loaded and can be called."""

    def __init__(self, data: Mapping[str, Any], folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        self.name: str = data["name"]
        self.mode: str = data["mode"]
        self.data = data
        self.signature: inspect.Signature = signature_from(data["parameters"])
        bounds = {name: (low, high) for name, (low, high) in data["sizes"].items()}
        self.promises = [TensorPromise.from_data(one) for one in data["tensors"]]
        self.is_dynamic = bool(bounds)
        self.bounds = bounds
        self._flags = data["flags"]
        self._checks = [TensorCheck(promise, bounds, data["declared"]) for promise in self.promises]
        self._matcher = Matcher(data["tree"], [promise.told() for promise in self.promises])
        self._conditions = data["conditions"]
        self._inputs: list[Any] = [weights.get(source.get("weight")) for source in data["inputs"]]
        names = {one["weight"]: one["written"] for one in data["inputs"] if "weight" in one}
        held = {name: weights[name] for name in names}
        self._check_sharing = SharingCheck(self.promises, held, (name for name in names if names[name]))
        self._tensors = [(i, one["tensor"]) for i, one in enumerate(data["inputs"]) if "tensor" in one]
        self._sizes = [(i, *one["size"]) for i, one in enumerate(data["inputs"]) if "size" in one]
        self._call = load_native(folder, data["plan"])

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The arguments of a call by name and the tensors in them.

        Raises:
            Mismatch: the call is not as promised.
        """
        try:
            arguments = bind(self.signature, args, kwargs)
        except TypeError as error:
            raise Mismatch("the call", f"does not fit: {error}", str(self.signature)) from error
        tensors: list[Any] = [None] * len(self.promises)
        try:
            self._matcher.take(arguments, tensors)
        except Mismatch:
            # A tensor before the place that was found is what a reader looks at first.
            self._check_each(tensors[: tensors.index(None)] if None in tensors else tensors)
            raise
        self.check(tensors)
        return arguments, tensors

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise Mismatch unless the tensors of a call, and the flags that it is made under, are as promised."""
        sizes = self._check_each(tensors)
        for condition in self._conditions:
            if not conditions.value_of(condition, sizes):
                found = ", ".join(f"{name} {size}" for name, size in sizes.items())
                raise Mismatch("the sizes", f"are {found}", conditions.told(condition))
        check_flags(self._flags)
        self._check_sharing(tensors)
        if torch.is_grad_enabled():
            self._check_gradients(tensors)

    def _check_each(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Check the first tensors of a call, each by itself; the dynamic sizes by name."""
        sizes: dict[str, int] = {}
        for check, tensor in zip(self._checks, tensors, strict=False):
            check(tensor, sizes)
        return sizes

    def run(self, arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Compute what was checked by `take`."""
        outputs, inputs = self.compute(tensors)
        return self._make_result(outputs, inputs, {**arguments, TENSORS: tensors})

    @functools.cached_property
    def _make_result(self) -> Maker:
        """Made at the first call: the classes of a result may be imported after the artefact was loaded."""
        return result_maker(self.data["result"])

    def compute(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        """The outputs of the graph, and its inputs, for tensors that were checked."""
        inputs = list(self._inputs)
        for place, number in self._tensors:
            inputs[place] = tensors[number]
        for place, number, dim in self._sizes:
            inputs[place] = tensors[number].shape[dim]
        with torch.no_grad():
            return self._call(*inputs), inputs

    def named_results(
        self, outputs: Sequence[Any], inputs: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a result by where they stand in it."""
        values = {"output": outputs, "input": inputs, "tensor": tensors}
        return [(path, values[kind][place]) for path, kind, place in places_of(self.data["result"])]

    def _check_gradients(self, tensors: Sequence[torch.Tensor]) -> None:
        """Where gradients are on and nothing wants one, nothing is recorded either way."""
        for tensor, promise in zip(tensors, self.promises, strict=True):
            if tensor.requires_grad:
                allowed = f"a call under torch.{self.mode}(), as at compile"
                raise Mismatch(promise.path, "wants gradients and gradients are on", allowed, ALL_TENSORS_FIT)
