"""The KDA delta rule as pure functions: log decay, recurrent form, chunk form (K3.1 spec 2.3 to 2.5)."""

import torch
from torch import Tensor, nn

from k31compile.model.norms import accumulate_dtype

CHUNK = 16


def kda_gate(raw_gate: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay g of each head and key channel, never above 0 (K3.1 spec 2.3).

    raw_gate [B, T, H, K], a_log [H], dt_bias [H, K] -> [B, T, H, K] in the accumulation dtype.
    Bounded form lb * sigmoid(exp(A) * (raw + bias)); without a bound -exp(A) * softplus(raw + bias).
    A raw gate of -inf gives 0, that is no decay: the rule for padding (K3.1 spec 2.5).
    """
    dtype = accumulate_dtype(raw_gate.dtype)
    rate = a_log.to(dtype).exp()[:, None]
    shifted = raw_gate.to(dtype) + dt_bias.to(dtype)
    if lower_bound is None:
        return -rate * nn.functional.softplus(shifted)
    return lower_bound * torch.sigmoid(rate * shifted)


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule, one token after the other: decay, predict, write, read (K3.1 spec 2.4).

    q, k, g [B, T, H, K] (q scaled, g the log decay), v [B, T, H, V], beta [B, T, H], state [B, H, K, V].
    Returns o [B, T, H, V] and the new state, both in the accumulation dtype of the state.
    """
    dtype = accumulate_dtype(state.dtype)
    q, k, v, g, beta, state = (x.to(dtype) for x in (q, k, v, g, beta, state))
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state
        predicted = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        update = beta[:, t].unsqueeze(-1) * (v[:, t] - predicted)
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, d] -> [B, H, N, chunk, d], padded with zeros at the end."""
    missing = -x.shape[1] % chunk
    x = nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).permute(0, 3, 1, 2, 4)


def _future(total: Tensor) -> Tensor:
    """True above the diagonal, where a row would see a later column: [..., C, K] -> bool [C, C]."""
    return torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(1)


def _pairwise(rows: Tensor, columns: Tensor, total: Tensor) -> Tensor:
    """sum_d rows[i,d] columns[j,d] exp(G[i,d] - G[j,d]) for i >= j, and 0 above the diagonal.

    rows [R, ..., C, K] holds R stacked left operands; columns and total [..., C, K] -> [R, ..., C, C].
    The difference is masked before exp: above the diagonal it is positive and can overflow, and neither
    factor exp(G) or exp(-G) is safe on its own under strong decay.
    """
    difference = total.unsqueeze(-2) - total.unsqueeze(-3)
    decay = difference.masked_fill(_future(total).unsqueeze(-1), float("-inf")).exp()
    decayed = decay * columns.unsqueeze(-3)
    return (decayed @ rows.unsqueeze(-1)).squeeze(-1)


def _pairwise_anchored(rows: Tensor, columns: Tensor, total: Tensor) -> Tensor:
    """The sums of `_pairwise` as one matrix product: exp(G[i] - a) on the rows, exp(a - G[j]) on the columns.

    The anchor a is G in the middle of the chunk, so a factor reaches exp(C/2 * strongest decay of a token) and no
    further: e^40 for chunks of 16 and a gate bounded at -5, where float32 ends at e^88. Above the diagonal the
    product may be huge, so it is overwritten, never multiplied by 0. The result does not depend on the anchor,
    which therefore takes no gradient.
    """
    anchor = total[..., total.shape[-2] // 2, None, :].detach()
    products = ((total - anchor).exp() * rows) @ ((anchor - total).exp() * columns).mT
    return products.masked_fill(_future(total), 0.0)


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk: int = CHUNK,
    anchored: bool = False,
) -> tuple[Tensor, Tensor]:
    """The delta rule over chunks; only the state passes from one chunk to the next (K3.1 spec 2.5).

    q, k, g [B, T, H, K] (q scaled, g the log decay), v [B, T, H, V], beta [B, T, H], state [B, H, K, V].
    Returns o [B, T, H, V] and the new state, both in the accumulation dtype of the state. Any T: the last
    chunk is filled with q = k = v = g = beta = 0, which leaves the state as it is. Takes T * chunk * K
    numbers per head for the pairwise decays, so feed long prompts in pieces; `anchored` needs none of them and
    is several times faster to train, but wants gates no stronger than about -10 a token (`_pairwise_anchored`).
    """
    dtype, length = accumulate_dtype(state.dtype), q.shape[1]
    q, k, v, g, beta, state = (x.to(dtype) for x in (q, k, v, g, beta, state))
    q, k, v, g, beta = (_in_chunks(x, chunk) for x in (q, k, v, g, beta.unsqueeze(-1)))
    total = g.cumsum(dim=-2)
    pairwise = _pairwise_anchored if anchored else _pairwise
    overlap, readout = pairwise(torch.stack([k, q]), k, total).unbind(0)
    from_start, to_end = total.exp(), (total[..., -1:, :] - total).exp()
    # (I + L)^-1 Diag(beta) applied to exp(G) k and to v; L is strictly lower, the unit diagonal is implied.
    right = beta * torch.cat([from_start * k, v], dim=-1)
    solved = torch.linalg.solve_triangular((beta * overlap).tril(-1), right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    last_decay = from_start[..., -1, :].unsqueeze(-1)
    outputs = []
    per_chunk = (x.unbind(2) for x in (w, u, from_start * q, readout, (to_end * k).mT, last_decay))
    for w_n, u_n, q_n, readout_n, k_n, decay_n in zip(*per_chunk, strict=True):
        written = u_n - w_n @ state
        outputs.append(q_n @ state + readout_n @ written)
        state = decay_n * state + k_n @ written
    o = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return o.transpose(1, 2), state
