"""Almost the routed experts: another activation, another place for the weight, another expert."""

import torch
import torch.nn.functional as F
from grouped_experts_styles import situ
from records import misser

near_miss = misser(
    "grouped_experts", arguments="y experts weights gate_up down", results="z", phase="prefill", lengths=(1, 7)
)


def gate_and_up(y, experts, gate_up):
    """[N, k, I] twice: the chosen experts' two products."""
    return torch.einsum("nkil,nl->nki", gate_up[experts], y).chunk(2, dim=-1)


def combined(inner, experts, weights, down):
    return torch.einsum("nkli,nki,nk->nl", down[experts], inner, weights)


@near_miss(served_by="gate_proj and up_proj exchanged")
def up_first(y, experts, weights, gate_up, down):
    """The packed weight is read up first; the operator's gate is the first half."""
    up, gate = gate_and_up(y, experts, gate_up)
    return combined(situ(gate, up), experts, weights, down)


@near_miss(served_by="gate_proj and up_proj exchanged, situ_beta=25 and linear_beta=4")
def sigmoid_of_the_straight_half(y, experts, weights, gate_up, down):
    """The sigmoid sees up; the operator's sees the gate."""
    gate, up = gate_and_up(y, experts, gate_up)
    inner = 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(up) * 25.0 * torch.tanh(up / 25.0)
    return combined(inner, experts, weights, down)


@near_miss()
def gate_without_sigmoid(y, experts, weights, gate_up, down):
    """The gate is only bounded by tanh; the operator multiplies its sigmoid in."""
    gate, up = gate_and_up(y, experts, gate_up)
    return combined(4.0 * torch.tanh(gate / 4.0) * 25.0 * torch.tanh(up / 25.0), experts, weights, down)


@near_miss()
def clamped_swiglu(y, experts, weights, gate_up, down):
    """Both halves are clamped and pass SwiGLU; the operator bends them by tanh."""
    gate, up = gate_and_up(y, experts, gate_up)
    return combined(F.silu(gate.clamp(max=4.0)) * up.clamp(-25.0, 25.0), experts, weights, down)


@near_miss(served_by='activation "swiglu"')
def swiglu_for_situ(y, experts, weights, gate_up, down):
    """silu(gate) up without any bound; the operator, told nothing else, bounds both halves."""
    gate, up = gate_and_up(y, experts, gate_up)
    return combined(F.silu(gate) * up, experts, weights, down)


@near_miss()
def gelu_gate(y, experts, weights, gate_up, down):
    """GELU opens the gate; the operator has SiTU and SiLU."""
    gate, up = gate_and_up(y, experts, gate_up)
    return combined(F.gelu(gate, approximate="tanh") * up, experts, weights, down)


@near_miss(served_by="situ_beta=25 and linear_beta=4")
def bounds_exchanged(y, experts, weights, gate_up, down):
    """The gate is bounded at 25 and the straight half at 4; the operator's usual bounds are 4 and 25."""
    gate, up = gate_and_up(y, experts, gate_up)
    return combined(situ(gate, up, 25.0, 4.0), experts, weights, down)


@near_miss(served_by="each pair as a token with one expert, summed behind it")
def weight_on_the_input(y, experts, weights, gate_up, down):
    """The routing weight scales the expert's input; the operator scales its output, which is not the same."""
    rows = y.unsqueeze(1) * weights.unsqueeze(-1)
    gate, up = torch.einsum("nkil,nkl->nki", gate_up[experts], rows).chunk(2, dim=-1)
    return combined(situ(gate, up), experts, torch.ones_like(weights), down)


@near_miss(served_by="the result plus the weighted numbers of the experts")
def bias_of_the_expert(y, experts, weights, gate_up, down):
    """Each expert adds its number as a bias to what it gives; the operator's experts have none."""
    gate, up = gate_and_up(y, experts, gate_up)
    out = torch.einsum("nkli,nki->nkl", down[experts], situ(gate, up)) + experts.unsqueeze(-1)
    return (out * weights.unsqueeze(-1)).sum(1)


@near_miss(served_by="down_proj rolled by one expert")
def down_of_the_next_expert(y, experts, weights, gate_up, down):
    """The down projection is that of the next expert; the operator's three matrices belong together."""
    gate, up = gate_and_up(y, experts, gate_up)
    return combined(situ(gate, up), (experts + 1) % down.shape[0], weights, down)


@near_miss(served_by="each pair as a token with one expert, the largest behind it")
def largest_expert_wins(y, experts, weights, gate_up, down):
    """The largest of the experts' weighted outputs is taken; the operator adds them up."""
    gate, up = gate_and_up(y, experts, gate_up)
    out = torch.einsum("nkli,nki->nkl", down[experts], situ(gate, up))
    return (out * weights.unsqueeze(-1)).amax(1)


@near_miss(served_by="the expert's steps one after the other")
def experts_in_a_chain(y, experts, weights, gate_up, down):
    """Each expert reads what the one before it left; the operator gives all of them the same row."""
    out = y
    for slot in range(experts.shape[1]):
        chosen = experts[:, slot : slot + 1]
        gate, up = gate_and_up(out, chosen, gate_up)
        out = out + combined(situ(gate, up), chosen, weights[:, slot : slot + 1], down)
    return out - y


@near_miss(served_by="the result plus y")
def token_kept_beside(y, experts, weights, gate_up, down):
    """The token itself is added to its experts' sum; the operator returns the sum."""
    gate, up = gate_and_up(y, experts, gate_up)
    return y + combined(situ(gate, up), experts, weights, down)


def share_of(expert, experts, weights):
    """[N, 1]: what the slots that name the expert weigh together."""
    return (weights * (experts == expert)).sum(-1, keepdim=True)


LISTS = "y experts weights gate_list up_list down_list"


@near_miss(arguments=LISTS, served_by="the list of down projections moved by one, the last one first")
def list_with_down_of_the_one_before(y, experts, weights, gates, ups, downs):
    """Each expert of the list has the down projection of the one before it."""
    out = torch.zeros_like(y)
    for e, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        out = out + share_of(e, experts, weights) * F.linear(situ(F.linear(y, gate), F.linear(y, up)), downs[e - 1])
    return out


@near_miss(arguments=LISTS, served_by="the third expert's gate and up projection exchanged in the lists")
def list_with_one_expert_turned(y, experts, weights, gates, ups, downs):
    """One expert of the list reads its gate from the up projection; the operator reads all alike."""
    out = torch.zeros_like(y)
    for e, down in enumerate(downs):
        gate, up = F.linear(y, gates[e]), F.linear(y, ups[e])
        inner = situ(up, gate) if e == 2 else situ(gate, up)
        out = out + share_of(e, experts, weights) * F.linear(inner, down)
    return out


@near_miss(arguments=LISTS, lengths=(7,), served_by="two experts exchanged in all three lists")
def list_with_two_shares_exchanged(y, experts, weights, gates, ups, downs):
    """The weights of experts 1 and 4 are exchanged."""
    out = torch.zeros_like(y)
    for e, (gate, up, down) in enumerate(zip(gates, ups, downs, strict=True)):
        share = share_of({1: 4, 4: 1}.get(e, e), experts, weights)
        out = out + share * F.linear(situ(F.linear(y, gate), F.linear(y, up)), down)
    return out


@near_miss(arguments=LISTS, lengths=(7,))
def list_with_a_linear_expert(y, experts, weights, gates, ups, downs):
    """One expert of the list has no activation."""
    out = torch.zeros_like(y)
    for e, (gate, up, down) in enumerate(zip(gates, ups, downs, strict=True)):
        halves = F.linear(y, gate), F.linear(y, up)
        inner = halves[0] * halves[1] if e == 6 else situ(*halves)
        out = out + share_of(e, experts, weights) * F.linear(inner, down)
    return out
