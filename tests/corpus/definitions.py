"""What each operator computes, written once in float64 and as plainly as possible: vectors, tokens, loops.

Each takes the operands by name and gives the results by name; options say what a program does beside the operator,
or which of the operator's variants it is.
"""

import torch
from operands import BEST_KEYS, CHOSEN, EPS, FACTOR, GROUPS, KEPT, LOWER_BOUND, TAPS, H, K, V
from torch import Tensor


def kda(made, *, gate="given", beta="given", l2=False, scaled=False, start=True):
    """Decay, predict, write, read, token by token and head by head (K3.1 spec 2.4)."""
    q, k, v = made["raw_q" if l2 else "q"], made["raw_k" if l2 else "k"], made["v"]
    if l2:
        q, k = (x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt() for x in (q, k))
    g = log_decay(made, gate)
    strength = {"given": made["beta"], "raw": made["raw_beta"].sigmoid(), "doubled": 2 * made["raw_beta"].sigmoid()}
    o, state = torch.zeros_like(v), made["s0"] * float(start)
    for b, h in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[2])).tolist():
        s = state[b, h].clone()
        for t in range(q.shape[1]):
            s = torch.diag(g[b, t, h].exp()) @ s
            update = strength[beta][b, t, h] * (v[b, t, h] - k[b, t, h] @ s)
            s = s + torch.outer(k[b, t, h], update)
            o[b, t, h] = q[b, t, h] @ s * (K**-0.5 if scaled else 1.0)
        state[b, h] = s
    pool = made["pool"].clone()
    pool[made["rows"]] = state.mT
    return {"o": o, "state": state, "pool": pool}


def log_decay(made, gate):
    """The log decay: as given, bounded below, or minus a rate times softplus (K3.1 spec 2.3)."""
    rate, shifted = made["a_log"].exp()[:, None], made["raw_g"] + made["dt_bias"]
    if gate == "bounded":
        return LOWER_BOUND / (1 + (-rate * shifted).exp())
    return -rate * (1 + shifted.exp()).log() if gate == "softplus" else made["g"]


def short_conv(made, *, silu=True, start=True):
    """One sum over the last W inputs a channel, then SiLU (K3.1 spec 2.6)."""
    x, weight = made["x"], made["conv_weight"]
    window = torch.cat([made["conv_full"] * float(start), x], dim=1)
    y = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for i in range(TAPS):
            y[:, t] += weight[:, i] * window[:, t + 1 + i]
    y = y / (1 + (-y).exp()) if silu else y
    return {"y": y, "conv_state": window[:, 1 - TAPS :], "conv_full": window[:, -TAPS:]}


def gated_rms_norm(made, *, activation="sigmoid", gate_first=False, one_more=False, eps=EPS):
    """x / rms(x) * weight * act(gate) over the last axis, or the gate before the norm (K3.1 spec 2.3, output)."""
    x, gate, weight = made["x"], made["gate"], made["norm_weight"] + float(one_more)
    open_ = 1 / (1 + (-gate).exp()) * (gate if activation == "silu" else 1)
    inner = x * open_ if gate_first else x
    normed = inner / (inner.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight
    return {"y": normed if gate_first else normed * open_}


def attn_res(made, *, source="prefix", temperature=1.0, with_partial=True):
    """A softmax over depth for each token on its own, the values as they are (K3.1 spec 2.2).

    `source` "sum": the running sum is prefix + delta. Also the second sub-layer's result and the normed one.
    """
    partial = made["prefix"] + (made["delta"] if source == "sum" else 0)
    first = _over_depth(made["bank"], partial if with_partial else None, made["query"], made["res_norm"], temperature)
    later = partial + made["delta"]
    second = _over_depth(made["bank"], later, made["next_query"], made["next_norm"], temperature)
    rms = (first.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    return {"h": first, "partial": partial, "next": second, "normed": first / rms * made["norm_weight"]}


def _over_depth(bank, partial, query, norm, temperature):
    sources = list(bank) if partial is None else [*bank, partial]
    logits = []
    for source in sources:
        rms = (source.pow(2).sum(-1) / source.shape[-1] + EPS).sqrt()
        logits.append(temperature * ((source * norm) @ query[0]) / rms)
    parts = [logit.exp() for logit in logits]
    total = sum(parts)
    return sum(part[..., None] / total[..., None] * source for part, source in zip(parts, sources, strict=True))


def moe_gating_top_k(
    made, *, norm="sigmoid", grouped=False, bias="bias", biased=True, renorm=True, factor=FACTOR, best=2
):
    """The k best experts of each token by score and bias, weighed by the score alone (K3.1 spec 2.18)."""
    logits = made["logits"]
    scores = 1 / (1 + (-logits).exp()) if norm == "sigmoid" else logits.exp() / logits.exp().sum(-1, keepdim=True)
    spread, experts = torch.zeros_like(scores), []
    for row, score in enumerate(scores.tolist()):
        choice = [s + b for s, b in zip(score, made[bias].tolist(), strict=True)] if biased else score
        allowed = _allowed(choice, best) if grouped else range(len(choice))
        chosen = sorted(allowed, key=lambda expert: -choice[expert])[:CHOSEN]
        total = sum(score[expert] for expert in chosen) if renorm else 1.0
        for expert in chosen:
            spread[row, expert] = factor * score[expert] / total
        experts.append(chosen)
    experts = torch.tensor(experts)
    return {"experts": experts, "weights": spread.gather(-1, experts), "spread": spread}


def _allowed(choice, best):
    """The experts of the groups whose `best` best experts have the largest sum."""
    size = len(choice) // GROUPS
    groups = [choice[first : first + size] for first in range(0, len(choice), size)]
    value = [sum(sorted(group)[-best:]) for group in groups]
    kept = sorted(range(GROUPS), key=lambda group: -value[group])[:KEPT]
    return [expert for expert in range(len(choice)) if expert // size in kept]


def grouped_experts(made, *, activation="situ", beta=4.0, linear_beta=25.0):
    """sum_j w_j down(act(gate(y), up(y))) of each token's experts, pair by pair (K3.1 spec 2.18)."""
    y, out = made["y"], torch.zeros_like(made["y"])
    for row in range(y.shape[0]):
        for expert, weight in zip(made["experts"][row].tolist(), made["weights"][row].tolist(), strict=True):
            g, u = made["gate"][expert] @ y[row], made["up"][expert] @ y[row]
            out[row] += weight * (made["down"][expert] @ activate(g, u, activation, beta, linear_beta))
    return {"z": out}


def activate(g, u, activation, beta, linear_beta):
    """SiTU, with or without a bound on the straight half, or silu(g) u (K3.1 spec 2.18)."""
    if activation == "swiglu":
        return g / (1 + (-g).exp()) * u
    straight = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return beta * torch.tanh(g / beta) / (1 + (-g).exp()) * straight


def lightning_indexer(made, *, marked=False):
    """The places of the best keys that each row sees, the best first (K3.1 spec 2.8).

    Where a row sees fewer: the first of the others, or -1 where `marked`.
    """
    rows = []
    for b, t in torch.cartesian_prod(*map(torch.arange, made["pos"].shape)).tolist():
        dots = made["k"][b] @ made["q"][b, t].mT
        score = (dots.clamp(min=0) * made["w"][b, t]).sum(-1).tolist()
        seen = int(made["pos"][b, t]) + 1
        best = sorted(range(seen), key=lambda place: -score[place])[:BEST_KEYS]
        rest = [-1 if marked else place for place in range(seen, seen + BEST_KEYS - len(best))]
        rows.append(best + rest)
    return {"chosen": torch.tensor(rows).view(*made["pos"].shape, BEST_KEYS)}


def sparse_flash_attention(made, *, scale, rope=False, own_heads=False):
    """A softmax over the chosen keys that a row sees, head by head (K3.1 spec 2.7 and 2.9)."""
    q, keys, values = made["q_latent"], made["cache"], made["cache"]
    out = torch.zeros(*q.shape[:-1], (made["head_values"] if own_heads else values).shape[-1], dtype=q.dtype)
    for b, t, h in torch.cartesian_prod(*map(torch.arange, q.shape[:-1])).tolist():
        if own_heads:
            keys, values = made["head_keys"][:, :, h], made["head_values"][:, :, h]
        places = [place for place in made["chosen"][b, t].tolist() if place <= int(made["pos"][b, t])]
        logits = keys[b, places] @ q[b, t, h]
        if rope:
            logits = logits + made["rope_cache"][b, places] @ made["q_rope"][b, t, h]
        parts = (scale * logits).exp()
        out[b, t, h] = parts / parts.sum() @ values[b, places]
    return {"out": out}


def mega_kda(made, *, gate="bounded"):
    """Short conv, unit keys and queries, gates, delta rule, gated norm, one after the other (K3.1 spec 2.3 to 2.6)."""
    conv = short_conv(made)
    heads = conv["y"].split([H * K, H * K, H * V], dim=-1)
    raw_q, raw_k, v = (x.unflatten(-1, (H, -1)) for x in heads)
    core = kda(made | {"raw_q": raw_q, "raw_k": raw_k, "v": v}, gate=gate, beta="raw", l2=True, scaled=True)
    normed = gated_rms_norm({"x": core["o"], "gate": made["out_gate"], "norm_weight": made["norm_weight"]})
    return {"y": normed["y"], "state": core["state"], "conv_state": conv["conv_state"], "conv_full": conv["conv_full"]}


DEFINITIONS = {
    "kda_recurrent": kda,
    "kda_chunk": kda,
    "short_conv": short_conv,
    "gated_rms_norm": gated_rms_norm,
    "attn_res": attn_res,
    "moe_gating_top_k": moe_gating_top_k,
    "grouped_experts": grouped_experts,
    "mega_kda": mega_kda,
    "lightning_indexer": lightning_indexer,
    "sparse_flash_attention": sparse_flash_attention,
}


def define(program, made) -> dict[str, Tensor]:
    """All results of the operator that `program` is held against, by name, in the usual layout."""
    return DEFINITIONS[program.operator](made, **program.options)
