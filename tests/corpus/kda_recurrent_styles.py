"""One or a few tokens of the delta rule as different authors would write them (K3.1 spec 2.4 and 3.3)."""

import math

import torch
import torch.nn.functional as F
from operands import LOG2E, LOWER_BOUND
from records import speller

spelling = speller("kda_recurrent", arguments="q k v g beta s0", results="o state", phase="unrolled", lengths=(1, 5, 8))


@spelling(options={"scaled": True})
def outer_by_einsum(q, k, v, g, beta, s0):
    """The outer product by einsum, beta on the key, the query scaled before the loop."""
    o, s = torch.zeros_like(v), s0.clone()
    q = q * q.shape[-1] ** -0.5
    for i in range(q.shape[1]):
        s = s * g[:, i, :, :, None].exp()
        seen = (k[:, i, :, :, None] * s).sum(-2)
        s = s + torch.einsum("bhk,bhv->bhkv", beta[:, i, :, None] * k[:, i], v[:, i] - seen)
        o[:, i] = torch.einsum("bhk,bhkv->bhv", q[:, i], s)
    return o, s


@spelling(half=True, options={"scaled": True})
def transposed_to_heads(query, key, value, g, beta, state):
    """Everything turned to [B, H, T, d] and float32 first, the delta scaled by beta, products by mul and sum."""
    query, key, value, g = (x.transpose(1, 2).contiguous().to(torch.float32) for x in (query, key, value, g))
    beta = beta.transpose(1, 2).contiguous().to(torch.float32)
    query = query * (1 / math.sqrt(query.shape[-1]))
    out = torch.zeros(*value.shape, dtype=value.dtype, device=value.device)
    for i in range(key.shape[2]):
        q_t, k_t, v_t = query[:, :, i], key[:, :, i], value[:, :, i]
        state = state * g[:, :, i].exp().unsqueeze(-1)
        memory = (state * k_t.unsqueeze(-1)).sum(dim=-2)
        delta = (v_t - memory) * beta[:, :, i].unsqueeze(-1)
        state = state + k_t.unsqueeze(-1) * delta.unsqueeze(-2)
        out[:, :, i] = (state * q_t.unsqueeze(-1)).sum(dim=-2)
    return out.transpose(1, 2).contiguous(), state


@spelling(arguments="q k v g beta s0_vk", results="o state_vk")
def value_rows(q, k, v, g, beta, s):
    """The state as [V, K]: the decay runs along its last axis, both products are S x column."""
    rows = []
    for i in range(q.shape[1]):
        s = s * g[:, i].exp().unsqueeze(-2)
        predicted = (s @ k[:, i].unsqueeze(-1)).squeeze(-1)
        fix = beta[:, i].unsqueeze(-1) * (v[:, i] - predicted)
        s = s + fix.unsqueeze(-1) * k[:, i].unsqueeze(-2)
        rows.append((s @ q[:, i].unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows, 1), s


@spelling(arguments="q_one k_one v_one g_one beta_one s0", results="o_one state", phase="decode", lengths=(1,))
def straight_line_step(q, k, v, g, beta, s):
    """A decode step without a token axis: row vectors times the state."""
    s = torch.exp(g)[..., None] * s
    u = beta[..., None, None] * (v[..., None, :] - k[..., None, :] @ s)
    s = s + k[..., :, None] @ u
    return (q[..., None, :] @ s)[..., 0, :], s


@spelling()
def base_two(q, k, v, g, beta, s):
    """The gate scaled to base 2 once, exp2 inside the loop."""
    in_bits, out = g * LOG2E, []
    for t in range(q.size(1)):
        s = torch.exp2(in_bits[:, t])[..., None] * s
        u = (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t])) * beta[:, t, :, None]
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(out, dim=1), s


@spelling(arguments="q_bhtd k_bhtd v_bhtd g_log2_bhtd beta_bhtd s0", results="o_bhtd state")
def base_two_given(q, k, v, bits, beta, s):
    """The gate comes in base 2 from outside, in [B, H, T, d]."""
    decay, out = bits.exp2().unsqueeze(-1), []
    for t in range(q.size(2)):
        s = s * decay[:, :, t]
        u = beta[:, :, t, None] * (v[:, :, t] - (k[:, :, t, None] @ s).squeeze(2))
        s = torch.addcmul(s, k[:, :, t, :, None], u.unsqueeze(2))
        out.append((q[:, :, t, None] @ s).squeeze(2))
    return torch.stack(out, dim=2), s


@spelling()
def beta_on_value_and_key(q, k, v, g, beta, s):
    """Beta multiplied into the value and into the key that erases, before the loop."""
    strong_v, strong_k = v * beta.unsqueeze(-1), k * beta.unsqueeze(-1)
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        erased = torch.einsum("bhk,bhkv->bhv", strong_k[:, t], s)
        s = s + k[:, t].unsqueeze(-1) * (strong_v[:, t] - erased).unsqueeze(-2)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], s)
    return out, s


@spelling(options={"scaled": True})
def transition_matrix(q, k, v, g, beta, s):
    """(I - beta k k') Diag(decay) built as a matrix, then one product; the output is scaled."""
    eye, out = torch.eye(k.shape[-1], dtype=s.dtype), []
    for q_t, k_t, v_t, g_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        b_t = b_t[..., None, None]
        move = (eye - b_t * k_t[..., :, None] * k_t[..., None, :]) @ torch.diag_embed(g_t.exp())
        s = move @ s + b_t * k_t[..., :, None] * v_t[..., None, :]
        out.append((s.mT @ q_t[..., None]).squeeze(-1) * q.shape[-1] ** -0.5)
    return torch.stack(out, dim=1), s


@spelling(lengths=(1, 4))
def heads_as_a_batch(q, k, v, g, beta, s):
    """[B * H] as one batch of matrices, baddbmm for what is written and for what is missing."""
    b, t, h, d = q.shape
    s, out = s.reshape(b * h, d, -1), []
    for i in range(t):
        q_i, k_i, v_i, g_i = (x[:, i].reshape(b * h, 1, -1) for x in (q, k, v, g))
        s = s * g_i.exp().transpose(1, 2)
        missing = torch.baddbmm(v_i, k_i, s, alpha=-1) * beta[:, i].reshape(b * h, 1, 1)
        s = torch.baddbmm(s, k_i.transpose(1, 2), missing)
        out.append(torch.bmm(q_i, s).view(b, h, -1))
    return torch.stack(out, dim=1), s.view(b, h, d, -1)


@spelling(arguments="q k v raw_g a_log dt_bias raw_beta s0", options={"gate": "bounded", "beta": "raw"}, half=True)
def bounded_gate_inside(q, k, v, raw, a_log, dt_bias, raw_beta, s):
    """The bounded gate and the sigmoid of beta at the top, everything cast up with .float()."""
    q, k, v, raw, beta = q.float(), k.float(), v.float(), raw.float(), raw_beta.float().sigmoid()
    g = LOWER_BOUND * torch.sigmoid(a_log.float().exp().view(1, 1, -1, 1) * (raw + dt_bias.float()))
    out = []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp()[..., None]
        u = (v[:, t] - (s * k[:, t][..., None]).sum(2)) * beta[:, t][..., None]
        s = s + k[:, t][..., None] * u[:, :, None]
        out.append((s * q[:, t][..., None]).sum(2))
    return torch.stack(out, 1), s


@spelling(arguments="q k v raw_g a_log dt_bias beta s0", options={"gate": "softplus"}, phase="decode", lengths=(1,))
def softplus_gate_step(q, k, v, raw, a_log, dt_bias, beta, s):
    """The unbounded gate as exp(-rate softplus) inside a step that squeezes its token axis."""
    decay = torch.exp(-a_log.exp()[:, None] * F.softplus(raw.squeeze(1) + dt_bias))
    k, v = k.squeeze(1), v.squeeze(1)
    s = decay.unsqueeze(-1) * s
    correction = beta.squeeze(1).unsqueeze(-1) * (v - torch.matmul(k.unsqueeze(-2), s).squeeze(-2))
    s = s + torch.matmul(k.unsqueeze(-1), correction.unsqueeze(-2))
    return torch.matmul(q.transpose(1, 2), s).transpose(1, 2), s


@spelling(arguments="q_flat k_flat v_flat raw_g_flat a_log dt_bias_flat beta s0", options={"gate": "softplus"})
def guarded_softplus(q, k, v, raw, a_log, dt_bias, beta, s):
    """Flat projections cut into heads; softplus as log(1 + exp) where that is safe."""
    heads = beta.shape[-1]
    shifted = (raw + dt_bias.view(1, 1, -1)).view(*raw.shape[:2], heads, -1)
    soft = torch.where(shifted > 20.0, shifted, torch.log(1.0 + torch.exp(shifted)))
    q, k, v = (x.view(*x.shape[:2], heads, -1) for x in (q, k, v))
    g, out = -torch.exp(a_log.view(1, 1, heads, 1)) * soft, []
    for t in range(q.shape[1]):
        s = s * g[:, t, :, :, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t]))
        s = s + k[:, t, :, :, None] * u[:, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(out, dim=1), s


@spelling(arguments="raw_q raw_k v g beta s0", options={"l2": True, "scaled": True})
def unit_vectors_inside(q, k, v, g, beta, s):
    """q and k normalised by rsqrt inside, the scale on the output."""
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6)
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    out = torch.zeros_like(v)
    for t in range(v.shape[1]):
        s = torch.mul(s, torch.exp(g[:, t]).unsqueeze(3))
        gap = torch.sub(v[:, t], torch.sum(s * k[:, t].unsqueeze(3), dim=2))
        s = torch.add(s, k[:, t].unsqueeze(3) * (gap * beta[:, t].unsqueeze(2)).unsqueeze(2))
        out[:, t] = torch.sum(s * q[:, t].unsqueeze(3), dim=2)
    return out / q.shape[-1] ** 0.5, s
