"""Run an author's program in float64, whatever it casts to: what is left of a difference is algebra, not rounding."""

import torch
from torch.overrides import TorchFunctionMode

NARROW = {torch.float32, torch.bfloat16, torch.float16}
CASTS = {torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half}


class Wide(TorchFunctionMode):
    """Every narrower float dtype that a program names, or gets by default, is float64 instead."""

    def __enter__(self):
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(self._before)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in CASTS:
            return args[0].double()
        args = [_widened(value) for value in args]
        kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        if func is torch._grouped_mm:
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)


def _widened(value):
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _grouped_mm(rows, matrices, *, offs, **_):
    """Torch's own refuses float64: rows [N, L] in groups that end at `offs` [E], matrices [E, L, M] -> [N, M]."""
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    groups = zip(starts, ends, matrices, strict=True)
    return torch.cat([rows[start:end] @ matrix for start, end, matrix in groups])
