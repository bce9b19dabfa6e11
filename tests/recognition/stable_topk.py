"""Eager with a rule for ties: torch.topk promises none, k31 gives equal scores to the lower position."""

import torch
from torch.overrides import TorchFunctionMode

_TOPK = {torch.topk, torch.Tensor.topk}
_ARGSORT = {torch.argsort, torch.Tensor.argsort}
_SORT = {torch.sort, torch.Tensor.sort}


class StableTopk(TorchFunctionMode):
    """Inside it every topk, sort and argsort is stable: equal values keep the order of their positions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _TOPK:
            return _topk(*args, **kwargs)
        if func in _ARGSORT:
            return _argsort(*args, **kwargs)
        if func in _SORT:
            return _sort(*args, **kwargs)
        return func(*args, **kwargs)


def _topk(values, k, dim=-1, largest=True, sorted=True):
    ranked = torch.sort(values, dim=dim, descending=largest, stable=True)
    picked = (part.narrow(dim, 0, k) for part in ranked)
    return torch.return_types.topk(tuple(picked))


def _argsort(values, dim=-1, descending=False, stable=True):
    return torch.sort(values, dim=dim, descending=descending, stable=True).indices


def _sort(values, dim=-1, descending=False, stable=True):
    return torch.sort(values, dim=dim, descending=descending, stable=True)


def stable_eager(fn, *args):
    """`fn(*args)` with the rule."""
    with StableTopk(), torch.no_grad():
        return fn(*args)
