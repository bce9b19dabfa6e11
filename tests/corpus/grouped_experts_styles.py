"""Routed experts as different authors would write them (K3.1 spec 2.18 and 3.6)."""

import torch
import torch.nn.functional as F
from operands import ROUTED
from records import speller

spelling = speller(
    "grouped_experts",
    arguments="y experts weights gate_up down",
    results="z",
    phase="prefill",
    lengths=(1, 7),
)


def situ(gate, up, beta=4.0, linear_beta=25.0):
    """The bounded gate times the bounded straight half."""
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


@spelling(half=True, breaks=True)
def one_hot_permuted(y, experts, weights, gate_up, down):
    """One-hot, permuted to experts first; experts without tokens skipped, torch.where, index_add_."""
    out = torch.zeros_like(y)
    mask = F.one_hot(experts, num_classes=gate_up.shape[0]).permute(2, 1, 0)
    for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        expert = hit[0]
        slot, token = torch.where(mask[expert])
        gate, up = F.linear(y[token], gate_up[expert]).chunk(2, dim=-1)
        rows = F.linear(situ(gate, up), down[expert]) * weights[token, slot, None]
        out.index_add_(0, token, rows.to(out.dtype))
    return out


@spelling(arguments="y ranked weights gate_list up_list down_list", options={"activation": "swiglu"}, breaks=True)
def list_of_experts(y, ranked, weights, gates, ups, downs):
    """Lists of matrices, experts by a top-k so that none comes twice, counted, += on indexed rows; SwiGLU."""
    experts = ranked.topk(weights.shape[-1], dim=-1).indices
    out = torch.zeros_like(y)
    counts = torch.bincount(experts.flatten(), minlength=len(gates)).tolist()
    for i, (gate, up, down) in enumerate(zip(gates, ups, downs, strict=True)):
        if counts[i] == 0:
            continue
        token, slot = torch.where(experts == i)
        rows = y[token]
        out[token] += F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down) * weights[token, slot, None]
    return out


@spelling(arguments="y experts weights gate_list up_list down_list", options={"activation": "swiglu"}, half=True)
def list_on_all_tokens(y, experts, weights, gates, ups, downs):
    """Matrices in Python lists, every expert on every token, its share summed over the slots that name it; SwiGLU."""
    out = torch.zeros_like(y)
    for e, (gate, up, down) in enumerate(zip(gates, ups, downs, strict=True)):
        share = (weights * (experts == e)).sum(-1, keepdim=True).to(y.dtype)
        out = out + share * F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
    return out


@spelling(arguments="y experts weights gate_up_list down_list")
def list_stacked(y, experts, weights, gate_ups, downs):
    """What each expert of a list gives, stacked; the rows of the chosen gathered from that."""
    halves = [F.linear(y, packed).chunk(2, dim=-1) for packed in gate_ups]
    rows = torch.stack([F.linear(situ(*pair), down) for pair, down in zip(halves, downs, strict=True)], dim=1)
    chosen = rows.gather(1, experts.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
    return (chosen * weights.unsqueeze(-1)).sum(dim=1)


@spelling()
def weights_gathered(y, experts, weights, gate_up, down):
    """The weights of each token's experts fetched by index; einsum over token and slot."""
    gate, up = torch.einsum("nkil,nl->nki", gate_up[experts], y).chunk(2, dim=-1)
    return torch.einsum("nkli,nki,nk->nl", down[experts], situ(gate, up), weights)


@spelling(arguments="y experts weights gate_io up_io down_io", options={"linear_beta": None}, half=True)
def bmm_of_pairs(y, experts, weights, gate, up, down):
    """[E, in, out] weights by index_select, one bmm for each projection; the straight half is unbounded."""
    n, k = experts.shape
    flat = experts.flatten()
    rows = y.repeat_interleave(k, dim=0).unsqueeze(1)
    g, u = torch.bmm(rows, gate.index_select(0, flat)), torch.bmm(rows, up.index_select(0, flat))
    inner = (4.0 * torch.tanh(g.float() / 4.0) * torch.sigmoid(g.float()) * u.float()).to(y.dtype)
    out = torch.bmm(inner, down.index_select(0, flat)).view(n, k, -1)
    return (out * weights.unsqueeze(-1)).sum(dim=1).to(y.dtype)


@spelling()
def dense_and_masked(y, experts, weights, gate_up, down):
    """All experts on all tokens; a dense row of weights, 0 where not chosen."""
    gate, up = torch.matmul(y, gate_up.transpose(1, 2)).chunk(2, dim=-1)
    out = torch.matmul(situ(gate, up), down.transpose(1, 2))
    spread = torch.zeros(y.shape[0], gate_up.shape[0], dtype=weights.dtype).scatter(1, experts, weights)
    return torch.einsum("ne,enl->nl", spread, out)


@spelling(breaks=True)
def sorted_segments(y, experts, weights, gate_up, down):
    """Pairs sorted by expert, split at the counts, undone by a scatter of rows and summed over the slots."""
    n, k = experts.shape
    order = experts.view(-1).argsort()
    counts = experts.view(-1).bincount(minlength=gate_up.shape[0]).tolist()
    out = []
    for expert, rows in enumerate(y[order // k].split(counts)):
        gate, up = (rows @ gate_up[expert].T).tensor_split(2, dim=-1)
        out.append(situ(gate, up) @ down[expert].T)
    joined = torch.cat(out)
    undone = torch.empty_like(joined)
    undone[order] = joined
    return (undone.view(n, k, -1) * weights.unsqueeze(-1)).sum(1)


@spelling(arguments="y experts weights gate_up_io down_io", half=True)
def grouped_products(y, experts, weights, gate_up, down):
    """F.grouped_mm over the sorted pairs with running offsets; Dynamo takes it in bfloat16 only."""
    k = experts.shape[1]
    order = torch.argsort(experts.flatten(), stable=True)
    token = order // k
    ends = torch.histc(experts.flatten().float(), bins=ROUTED, min=0, max=ROUTED - 1).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(y[token], gate_up, offs=ends).chunk(2, dim=-1)
    rows = F.grouped_mm(situ(gate, up), down, offs=ends) * weights.flatten()[order, None]
    return torch.zeros_like(y).index_add(0, token, rows.to(y.dtype))


@spelling(arguments="y experts weights gate up down")
def one_hot_einsum(y, experts, weights, gate, up, down):
    """Dispatch and combine as dense one-hot tensors of four einsums; no index anywhere."""
    dispatch = F.one_hot(experts, ROUTED).to(y.dtype)
    rows = torch.einsum("nke,nl->nkel", dispatch, y)
    g, u = torch.einsum("nkel,eil->nki", rows, gate), torch.einsum("nkel,eil->nki", rows, up)
    return torch.einsum("nki,nke,eli,nk->nl", situ(g, u), dispatch, down, weights)


@spelling(arguments="y experts weights gate up down", options={"activation": "swiglu"}, breaks=True)
def masked_rows_by_slot(y, experts, weights, gate, up, down):
    """A copy of the tokens for each slot, a bool mask for each expert, the weighted sum over a view."""
    n, k = experts.shape
    rows = y[:, None].expand(-1, k, -1).reshape(n * k, -1)
    out, chosen = torch.zeros_like(rows), experts.reshape(-1)
    for e in range(gate.shape[0]):
        mine = chosen == e
        if mine.any():
            out[mine] = (F.silu(rows[mine] @ gate[e].mT) * (rows[mine] @ up[e].mT)) @ down[e].mT
    return (out.view(n, k, -1) * weights.view(n, k, 1)).sum(dim=1)


@spelling()
def weight_before_down(y, experts, weights, gate_up, down):
    """The routing weight goes onto the inner row, before the down projection, slot by slot."""
    out = torch.zeros_like(y)
    for slot in range(experts.shape[1]):
        packed = gate_up[experts[:, slot]]
        gate, up = (packed @ y.unsqueeze(-1)).squeeze(-1).split(packed.shape[1] // 2, dim=-1)
        inner = situ(gate, up) * weights[:, slot, None]
        out = out + (down[experts[:, slot]] @ inner.unsqueeze(-1)).squeeze(-1)
    return out


@spelling(arguments="y experts weights gate up down")
def every_pair_by_itself(y, experts, weights, gate, up, down):
    """Python loops over tokens and slots with one matrix and vector product each."""
    rows = []
    for n, (chosen, share) in enumerate(zip(experts.tolist(), weights.unbind(0), strict=True)):
        parts = [
            w * torch.mv(down[e], situ(torch.mv(gate[e], y[n]), torch.mv(up[e], y[n])))
            for e, w in zip(chosen, share, strict=True)
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)
