"""What the weights of a model cost a token: no prompt is read in less than the products with them take."""

from torch import nn


def weight_products(model: nn.Module, experts_per_token: int) -> float:
    """Multiplications and additions of one token with all linear layers and with the experts that it picks.

    Experts are parameters [E, ., .] with "experts" in their path. What depends on a sequence is left out.
    """
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    experts = (
        weight.shape[1] * weight.shape[2]
        for path, weight in model.named_parameters()
        if "experts" in path and weight.dim() == 3
    )
    return 2.0 * (linear + experts_per_token * sum(experts))
