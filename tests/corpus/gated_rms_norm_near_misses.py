"""Almost the gated RMS norm: other statistics, other places for eps, other gates."""

import torch
from operands import EPS
from records import misser

near_miss = misser("gated_rms_norm", arguments="x gate norm_weight", results="y", phase="prefill", lengths=(1, 7))


@near_miss(served_by="x less its mean")
def mean_subtracted(x, gate, weight):
    """The mean is taken off first, as a layer norm does; the operator leaves it in."""
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight * gate.sigmoid()


@near_miss()
def eps_outside_the_root(x, gate, weight):
    """eps is added to the root; the operator adds it to the mean square, which matters in small rows."""
    return x / (x.square().mean(-1, keepdim=True).sqrt() + EPS) * weight * gate.sigmoid()


@near_miss()
def eps_as_a_floor(x, gate, weight):
    """The mean square is kept above eps; the operator adds eps to it."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp_min(EPS)) * weight * gate.sigmoid()


@near_miss()
def mean_of_magnitudes(x, gate, weight):
    """Divided by the mean magnitude; the operator takes the root of the mean square."""
    return x / (x.abs().mean(-1, keepdim=True) + EPS) * weight * gate.sigmoid()


@near_miss(served_by="weight / sqrt(V) and eps / V")
def sum_for_mean(x, gate, weight):
    """The sum of squares is not divided by V; the operator takes the mean."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) * weight * gate.sigmoid()


@near_miss(served_by="norm_before_gate=False")
def gate_before_the_norm(x, gate, weight):
    """The gate goes in before the norm; the operator, told nothing else, gates what is normed."""
    x = x * gate.sigmoid()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


@near_miss()
def statistics_of_the_gated(x, gate, weight):
    """The gated rows give the mean square and the plain rows are divided by it; the operator uses one of the two."""
    gated = x * gate.sigmoid()
    return x * torch.rsqrt(gated.square().mean(-1, keepdim=True) + EPS) * weight


@near_miss()
def tanh_gate(x, gate, weight):
    """tanh opens the gate; the operator has sigmoid and SiLU."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight * torch.tanh(gate)


@near_miss(served_by="x and gate exchanged")
def gate_is_normed(x, gate, weight):
    """The gate is normed and x opens it; the operator does the reverse."""
    return gate * torch.rsqrt(gate.square().mean(-1, keepdim=True) + EPS) * weight * x.sigmoid()


@near_miss()
def normed_gate_opens(x, gate, weight):
    """The gate is normed before its sigmoid and x is not; the operator norms x."""
    normed = gate * torch.rsqrt(gate.square().mean(-1, keepdim=True) + EPS) * weight
    return x * normed.sigmoid()


@near_miss(served_by="one head of H * V, the weight repeated")
def norm_over_all_heads(x, gate, weight):
    """One mean square for all heads of a token; the operator has one for each head."""
    return x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + EPS) * weight * gate.sigmoid()


@near_miss(served_by="gate = the normed row times the gate")
def x_gates_itself(x, gate, weight):
    """sigmoid of the normed row times the gate; the operator's sigmoid sees the gate alone."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    return normed * torch.sigmoid(normed * gate)
