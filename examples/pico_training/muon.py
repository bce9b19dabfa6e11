"""Muon: momentum whose step is the nearest orthogonal matrix (Jordan et al. 2024), for many matrices at once.

torch.optim.Muon is not used for three reasons: it takes two-dimensional parameters only (experts have three), goes
through bfloat16 (which a CPU without AVX-512 multiplies a hundred times slower), and handles one matrix at a time.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring all singular values of [..., m, n] near 1 by five quintic Newton-Schulz steps."""
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    x = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide is matrices else x.mT


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, for parameters of two axes, or three with the first one a batch."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)

    def _update(self, parameters: list[nn.Parameter], group: dict) -> None:
        """One step for parameters of the same shape, orthogonalised together."""
        ahead = []
        for parameter in parameters:
            state = self.state[parameter]
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 1 - group["momentum"])
            ahead.append(parameter.grad.lerp(momentum, group["momentum"]))
        rows, columns = parameters[0].shape[-2:]
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for parameter, update in zip(parameters, orthogonalize(torch.stack(ahead)), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)
