"""The delta rule with one gate a head, as two people write it."""

import torch
import torch.nn.functional as F
from stranger import Stranger
from torch import nn


# 1. A model file's recurrence inside its layer: grouped values, softplus gate, state in and out.
def l2norm(x, dim=-1, eps=1e-6):
    inv_norm = torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)
    return x * inv_norm


def torch_recurrent_gated_delta_rule(query, key, value, g, beta, initial_state, output_final_state):
    initial_dtype = query.dtype
    query, key = l2norm(query), l2norm(key)
    query, key, value, beta, g = [
        x.transpose(1, 2).contiguous().to(torch.float32) for x in (query, key, value, beta, g)
    ]
    batch_size, num_heads, sequence_length, k_head_dim = key.shape
    v_head_dim = value.shape[-1]
    query = query * (1 / (query.shape[-1] ** 0.5))
    core_attn_out = torch.zeros(batch_size, num_heads, sequence_length, v_head_dim).to(value)
    last_recurrent_state = (
        torch.zeros(batch_size, num_heads, k_head_dim, v_head_dim).to(value)
        if initial_state is None
        else initial_state.to(value)
    )
    for i in range(sequence_length):
        q_t, k_t, v_t = query[:, :, i], key[:, :, i], value[:, :, i]
        g_t = g[:, :, i].exp().unsqueeze(-1).unsqueeze(-1)
        beta_t = beta[:, :, i].unsqueeze(-1)
        last_recurrent_state = last_recurrent_state * g_t
        kv_mem = (last_recurrent_state * k_t.unsqueeze(-1)).sum(dim=-2)
        delta = (v_t - kv_mem) * beta_t
        last_recurrent_state = last_recurrent_state + k_t.unsqueeze(-1) * delta.unsqueeze(-2)
        core_attn_out[:, :, i] = (last_recurrent_state * q_t.unsqueeze(-1)).sum(dim=-2)
    if not output_final_state:
        last_recurrent_state = None
    return core_attn_out.transpose(1, 2).contiguous().to(initial_dtype), last_recurrent_state


class GatedDeltaNet(nn.Module):
    def __init__(self, hidden=24, k_heads=2, v_heads=4, dk=6, dv=10):
        super().__init__()
        self.k_heads, self.v_heads, self.dk, self.dv = k_heads, v_heads, dk, dv
        self.in_proj_qkvz = nn.Linear(hidden, 2 * k_heads * dk + 2 * v_heads * dv, bias=False)
        self.in_proj_ba = nn.Linear(hidden, 2 * v_heads, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(v_heads))
        self.A_log = nn.Parameter(torch.log(torch.empty(v_heads).uniform_(0.1, 4)))
        self.weight = nn.Parameter(torch.ones(dv))
        self.out_proj = nn.Linear(v_heads * dv, hidden, bias=False)

    def forward(self, x, state):
        b, t, _ = x.shape
        wide_k, wide_v = self.k_heads * self.dk, self.v_heads * self.dv
        q, k, v, z = self.in_proj_qkvz(x).split([wide_k, wide_k, wide_v, wide_v], dim=-1)
        beta, a = self.in_proj_ba(x).chunk(2, dim=-1)
        q, k = q.view(b, t, -1, self.dk), k.view(b, t, -1, self.dk)
        v, z = v.view(b, t, -1, self.dv), z.view(b, t, -1, self.dv)
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        q = q.repeat_interleave(self.v_heads // self.k_heads, dim=2)
        k = k.repeat_interleave(self.v_heads // self.k_heads, dim=2)
        out, state = torch_recurrent_gated_delta_rule(q, k, v, g, beta.sigmoid(), state, True)
        shape = out.shape
        out, z = out.reshape(-1, self.dv), z.reshape(-1, self.dv)
        out = self.weight * (out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-6))
        out = out * F.silu(z.to(torch.float32))
        return self.out_proj(out.view(shape).flatten(-2)), state


# 2. Chunks in the manner of Keras: layers with get_config-like numbers, decays as a masked matrix, a solve.
class DeltaMixer(nn.Module):
    def __init__(self, units=20, num_heads=2, key_dim=8, value_dim=6, chunk_length=16):
        super().__init__()
        self.num_heads, self.key_dim, self.value_dim, self.chunk_length = num_heads, key_dim, value_dim, chunk_length
        self.query_dense = nn.Linear(units, num_heads * key_dim)
        self.key_dense = nn.Linear(units, num_heads * key_dim)
        self.value_dense = nn.Linear(units, num_heads * value_dim)
        self.gate_dense = nn.Linear(units, num_heads)
        self.beta_dense = nn.Linear(units, num_heads)

    def split_heads(self, tensor, depth):
        batch_size, length = tensor.size(0), tensor.size(1)
        tensor = torch.reshape(tensor, (batch_size, length, self.num_heads, depth))
        tensor = torch.permute(tensor, (0, 2, 1, 3))
        return torch.reshape(tensor, (batch_size, self.num_heads, -1, self.chunk_length, depth))

    def forward(self, inputs):
        batch_size, length, _ = inputs.shape
        padding = self.chunk_length * ((length + self.chunk_length - 1) // self.chunk_length) - length
        q = F.normalize(self.query_dense(inputs).unflatten(-1, (self.num_heads, -1)), dim=-1).flatten(2)
        k = F.normalize(self.key_dense(inputs).unflatten(-1, (self.num_heads, -1)), dim=-1).flatten(2)
        v, g, beta = self.value_dense(inputs), F.logsigmoid(self.gate_dense(inputs)), self.beta_dense(inputs).sigmoid()
        q, k, v, g, beta = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v, g, beta))
        q, k = self.split_heads(q, self.key_dim), self.split_heads(k, self.key_dim)
        v, g, beta = self.split_heads(v, self.value_dim), self.split_heads(g, 1), self.split_heads(beta, 1)
        total = torch.cumsum(g, dim=-2)
        lower = torch.tril(torch.ones((self.chunk_length, self.chunk_length)))
        decay = torch.exp((total - total.transpose(-1, -2)) * lower) * lower
        scores = torch.matmul(k, k.transpose(-1, -2)) * decay * beta
        system = torch.eye(self.chunk_length) + torch.tril(scores, diagonal=-1)
        pseudo_values = torch.linalg.solve(system, beta * v)
        pseudo_keys = torch.linalg.solve(system, beta * k * torch.exp(total))
        attention = torch.matmul(q, k.transpose(-1, -2)) * decay
        memory = torch.zeros((batch_size, self.num_heads, self.key_dim, self.value_dim))
        outputs = []
        for step in range(q.shape[2]):
            fresh = pseudo_values[:, :, step] - torch.matmul(pseudo_keys[:, :, step], memory)
            read = torch.matmul(q[:, :, step] * torch.exp(total[:, :, step]), memory)
            outputs.append(read + torch.matmul(attention[:, :, step], fresh))
            remaining = total[:, :, step, -1:] - total[:, :, step]
            memory = torch.exp(total[:, :, step, -1:]) * memory + torch.matmul(
                (k[:, :, step] * torch.exp(remaining)).transpose(-1, -2), fresh
            )
        outputs = torch.cat(outputs, dim=2)[:, :, :length] / self.key_dim**0.5
        return torch.reshape(torch.permute(outputs, (0, 2, 1, 3)), (batch_size, length, -1))


STRANGERS = [
    Stranger(
        "grouped_layer",
        lambda: (GatedDeltaNet(), (torch.randn(2, 3, 24), torch.randn(2, 4, 6, 10))),
        {"gated_delta_recurrent": 1, "gated_rms_norm": 1},
    ),
    Stranger("keras_chunk", lambda: (DeltaMixer(), (torch.randn(2, 41, 20),)), {"gated_delta_chunk": 1}),
]
