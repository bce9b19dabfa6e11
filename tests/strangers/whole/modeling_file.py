"""HuggingFace modeling file."""

import torch
import torch.nn.functional as F
from torch import nn


class KimiConfig:
    def __init__(self, **kw):
        self.vocab_size = 50
        self.hidden_size = 32
        self.num_hidden_layers = 3
        self.full_attn_layers = [1]
        self.num_attention_heads = 2
        self.q_lora_rank = 12
        self.kv_lora_rank = 16
        self.qk_nope_head_dim = 8
        self.qk_rope_head_dim = 4
        self.v_head_dim = 8
        self.index_n_heads = 8
        self.index_head_dim = 8
        self.index_topk = 4
        self.linear_num_heads = 2
        self.linear_head_dim = 8
        self.short_conv_kernel_size = 4
        self.num_experts = 6
        self.num_experts_per_token = 2
        self.moe_intermediate_size = 12
        self.routed_hidden = 16
        self.routed_scaling_factor = 1.7
        self.rms_norm_eps = 1e-5
        self.attn_res_block_size = 2
        self.first_k_dense_replace = 1
        self.intermediate_size = 24
        self.gate_lower_bound = -5.0
        for k, v in kw.items():
            setattr(self, k, v)


class KimiRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class KimiRMSNormGated(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states, gate=None):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight * hidden_states.to(input_dtype)
        hidden_states = hidden_states * torch.sigmoid(gate.to(torch.float32))
        return hidden_states.to(input_dtype)


class KimiDynamicCache:
    def __init__(self, config):
        n = config.num_hidden_layers
        self.conv_states = [None] * n
        self.recurrent_states = [None] * n
        self.key_cache = [None] * n
        self.value_cache = [None] * n
        self.index_key_cache = [None] * n
        self.seen = 0

    def update(self, k, v, layer_idx):
        if self.key_cache[layer_idx] is None:
            self.key_cache[layer_idx] = k
            self.value_cache[layer_idx] = v
        else:
            self.key_cache[layer_idx] = torch.cat([self.key_cache[layer_idx], k], dim=2)
            self.value_cache[layer_idx] = torch.cat([self.value_cache[layer_idx], v], dim=2)
        return self.key_cache[layer_idx], self.value_cache[layer_idx]

    def update_index(self, k, layer_idx):
        if self.index_key_cache[layer_idx] is None:
            self.index_key_cache[layer_idx] = k
        else:
            self.index_key_cache[layer_idx] = torch.cat([self.index_key_cache[layer_idx], k], dim=1)
        return self.index_key_cache[layer_idx]

    def get_seq_length(self):
        return self.seen


def l2norm(x, dim=-1, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)


def torch_causal_conv1d_update(hidden_states, conv_state, weight):
    _, hidden_size, seq_len = hidden_states.shape
    state_len = conv_state.shape[-1]
    hidden_states_new = torch.cat([conv_state, hidden_states], dim=-1).to(weight.dtype)
    conv_state.copy_(hidden_states_new[:, :, -state_len:])
    out = F.conv1d(hidden_states_new, weight.unsqueeze(1), padding=0, groups=hidden_size)
    return F.silu(out[:, :, -seq_len:]).to(hidden_states.dtype)


def torch_chunk_kda(
    query,
    key,
    value,
    g,
    beta,
    chunk_size=64,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
):
    initial_dtype = query.dtype
    if use_qk_l2norm_in_kernel:
        query = l2norm(query)
        key = l2norm(key)
    query, key, value, beta, g = [
        x.transpose(1, 2).contiguous().to(torch.float32) for x in (query, key, value, beta, g)
    ]
    b, h, t, dk = key.shape
    dv = value.shape[-1]
    pad = (chunk_size - t % chunk_size) % chunk_size
    query = F.pad(query, (0, 0, 0, pad))
    key = F.pad(key, (0, 0, 0, pad))
    value = F.pad(value, (0, 0, 0, pad))
    beta = F.pad(beta, (0, pad))
    g = F.pad(g, (0, 0, 0, pad))
    total = t + pad
    scale = 1 / (query.shape[-1] ** 0.5)
    query = query * scale
    v_beta = value * beta.unsqueeze(-1)
    k_beta = key * beta.unsqueeze(-1)
    query, key, value, k_beta, v_beta, g = [
        x.reshape(b, h, -1, chunk_size, x.shape[-1]) for x in (query, key, value, k_beta, v_beta, g)
    ]
    mask = torch.triu(torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device), diagonal=0)
    mask1 = torch.triu(torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device), diagonal=1)
    g = g.cumsum(dim=-2)
    decay = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(mask1.unsqueeze(-1), float("-inf")).exp()
    attn = -(k_beta.unsqueeze(-2) * key.unsqueeze(-3) * decay).sum(-1).masked_fill(mask, 0)
    for i in range(1, chunk_size):
        row = attn[..., i, :i].clone()
        sub = attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    attn = attn + torch.eye(chunk_size, dtype=attn.dtype, device=attn.device)
    value = attn @ v_beta
    k_cumdecay = attn @ (k_beta * g.exp())
    state = torch.zeros(b, h, dk, dv).to(value) if initial_state is None else initial_state.to(value)
    out = torch.zeros_like(value)
    for i in range(0, total // chunk_size):
        q_i, k_i, v_i = query[:, :, i], key[:, :, i], value[:, :, i]
        a = (q_i.unsqueeze(-2) * k_i.unsqueeze(-3) * decay[:, :, i]).sum(-1).masked_fill(mask1, 0)
        v_new = v_i - k_cumdecay[:, :, i] @ state
        out[:, :, i] = (q_i * g[:, :, i].exp()) @ state + a @ v_new
        state = (
            state * g[:, :, i, -1, :, None].exp()
            + (k_i * (g[:, :, i, -1, None] - g[:, :, i]).exp()).transpose(-1, -2) @ v_new
        )
    if not output_final_state:
        state = None
    out = out.reshape(b, h, -1, dv)[:, :, :t]
    return out.transpose(1, 2).contiguous().to(initial_dtype), state


def torch_recurrent_kda(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel=False):
    initial_dtype = query.dtype
    if use_qk_l2norm_in_kernel:
        query = l2norm(query)
        key = l2norm(key)
    query, key, value, beta, g = [
        x.transpose(1, 2).contiguous().to(torch.float32) for x in (query, key, value, beta, g)
    ]
    b, h, t, dk = key.shape
    dv = value.shape[-1]
    query = query * (1 / (query.shape[-1] ** 0.5))
    out = torch.zeros(b, h, t, dv).to(value)
    state = torch.zeros(b, h, dk, dv).to(value) if initial_state is None else initial_state.to(value)
    for i in range(t):
        q_t, k_t, v_t = query[:, :, i], key[:, :, i], value[:, :, i]
        g_t = g[:, :, i].exp().unsqueeze(-1)
        beta_t = beta[:, :, i].unsqueeze(-1)
        state = state * g_t
        kv_mem = (state * k_t.unsqueeze(-1)).sum(dim=-2)
        delta = (v_t - kv_mem) * beta_t
        state = state + k_t.unsqueeze(-1) * delta.unsqueeze(-2)
        out[:, :, i] = (state * q_t.unsqueeze(-1)).sum(dim=-2)
    if not output_final_state:
        state = None
    return out.transpose(1, 2).contiguous().to(initial_dtype), state


class KimiDeltaAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.linear_num_heads
        self.head_dim = config.linear_head_dim
        self.conv_size = config.short_conv_kernel_size
        p = self.num_heads * self.head_dim
        d = config.hidden_size
        self.lower = config.gate_lower_bound
        self.q_proj = nn.Linear(d, p, bias=False)
        self.k_proj = nn.Linear(d, p, bias=False)
        self.v_proj = nn.Linear(d, p, bias=False)
        self.conv1d = nn.Conv1d(3 * p, 3 * p, self.conv_size, groups=3 * p, padding=self.conv_size - 1, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(p))
        self.f_a_proj = nn.Linear(d, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, p, bias=False)
        self.b_proj = nn.Linear(d, self.num_heads, bias=False)
        self.g_proj = nn.Linear(d, p, bias=False)
        self.o_norm = KimiRMSNormGated(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(p, d, bias=False)

    def forward(self, hidden_states, attention_mask=None, cache_params=None):
        if (
            attention_mask is not None
            and attention_mask.shape[1] > 1
            and attention_mask.shape[0] > 1
            and hidden_states.shape[1] > 1
        ):
            hidden_states = (hidden_states * attention_mask[:, -hidden_states.shape[1] :, None]).to(hidden_states.dtype)
        batch_size, seq_len, _ = hidden_states.shape
        use_precomputed = (
            cache_params is not None and cache_params.recurrent_states[self.layer_idx] is not None and seq_len == 1
        )
        mixed = torch.cat(
            [self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)], dim=-1
        ).transpose(1, 2)
        if use_precomputed:
            mixed = torch_causal_conv1d_update(
                mixed, cache_params.conv_states[self.layer_idx], self.conv1d.weight.squeeze(1)
            )
        else:
            if cache_params is not None:
                cache_params.conv_states[self.layer_idx] = F.pad(mixed, (self.conv_size - mixed.shape[-1] - 1, 0))
            mixed = F.silu(self.conv1d(mixed)[:, :, :seq_len])
        mixed = mixed.transpose(1, 2)
        q, k, v = torch.split(mixed, self.num_heads * self.head_dim, dim=-1)
        q, k, v = (x.reshape(batch_size, seq_len, self.num_heads, self.head_dim) for x in (q, k, v))
        g = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias
        g = g.view(batch_size, seq_len, self.num_heads, self.head_dim)
        g = self.lower * torch.sigmoid(self.A_log.float().exp().view(1, 1, -1, 1) * g)
        beta = self.b_proj(hidden_states).float().sigmoid()
        state = cache_params.recurrent_states[self.layer_idx] if cache_params is not None else None
        if use_precomputed:
            o, last = torch_recurrent_kda(q, k, v, g, beta, state, True, use_qk_l2norm_in_kernel=True)
        else:
            o, last = torch_chunk_kda(
                q,
                k,
                v,
                g,
                beta,
                chunk_size=8,
                initial_state=None,
                output_final_state=cache_params is not None,
                use_qk_l2norm_in_kernel=True,
            )
        if cache_params is not None:
            cache_params.recurrent_states[self.layer_idx] = last
        gate = self.g_proj(hidden_states).view(batch_size, seq_len, -1, self.head_dim)
        o = self.o_norm(o, gate)
        return self.o_proj(o.reshape(batch_size, seq_len, -1))


class KimiIndexer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.n_heads = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.topk = config.index_topk
        self.wq_b = nn.Linear(config.q_lora_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, self.n_heads, bias=False)

    @torch.no_grad()
    def forward(self, hidden_states, q_resid, attention_mask, cache):
        b, s, _ = hidden_states.shape
        q = self.wq_b(q_resid).view(b, s, self.n_heads, self.head_dim)
        k = self.k_norm(self.wk(hidden_states))
        if cache is not None:
            k = cache.update_index(k, self.layer_idx)
        weights = self.weights_proj(hidden_states).float() * (self.n_heads**-0.5)
        scores = torch.einsum("bshd,btd->bsht", q.float(), k.float()) * (self.head_dim**-0.5)
        scores = F.relu(scores)
        index_scores = torch.einsum("bsht,bsh->bst", scores, weights)
        if attention_mask is not None:
            index_scores = index_scores + attention_mask[:, 0]
        return index_scores.topk(min(self.topk, k.shape[1]), dim=-1).indices


class KimiMLAAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        d = config.hidden_size
        self.q_a_proj = nn.Linear(d, config.q_lora_rank, bias=False)
        self.q_a_layernorm = KimiRMSNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * self.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = KimiRMSNorm(config.kv_lora_rank)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, self.num_heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(self.num_heads * config.v_head_dim, d, bias=False)
        self.g_proj = nn.Linear(d, self.num_heads * config.v_head_dim, bias=False)
        self.indexer = KimiIndexer(config, layer_idx)
        self.scaling = self.qk_head_dim**-0.5

    def forward(self, hidden_states, attention_mask, past_key_values=None):
        c = self.config
        b, s = hidden_states.shape[:-1]
        q_resid = self.q_a_layernorm(self.q_a_proj(hidden_states))
        q_states = self.q_b_proj(q_resid).view(b, s, -1, self.qk_head_dim).transpose(1, 2)
        k_pass, k_rot = torch.split(
            self.kv_a_proj_with_mqa(hidden_states), [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1
        )
        k_pass = (
            self.kv_b_proj(self.kv_a_layernorm(k_pass))
            .view(b, s, -1, c.qk_nope_head_dim + c.v_head_dim)
            .transpose(1, 2)
        )
        k_pass, value = torch.split(k_pass, [c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k_rot = k_rot.view(b, 1, s, c.qk_rope_head_dim).expand(*k_pass.shape[:-1], -1)
        key = torch.cat((k_pass, k_rot), dim=-1)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        topk = self.indexer(hidden_states, q_resid, attention_mask, past_key_values)
        index_mask = (
            torch.full(
                (b, s, key.shape[2]), torch.finfo(q_states.dtype).min, device=q_states.device, dtype=q_states.dtype
            )
            .scatter_(-1, topk, 0.0)
            .unsqueeze(1)
        )
        if attention_mask is not None:
            index_mask = torch.maximum(
                index_mask + attention_mask, torch.full_like(index_mask, torch.finfo(q_states.dtype).min)
            )
        attn = torch.matmul(q_states, key.transpose(2, 3)) * self.scaling
        attn = attn + index_mask
        attn = F.softmax(attn, dim=-1, dtype=torch.float32).to(q_states.dtype)
        attn = F.dropout(attn, p=0.0, training=self.training)
        out = torch.matmul(attn, value).transpose(1, 2).reshape(b, s, -1).contiguous()
        out = out * torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(out)


class KimiMLP(nn.Module):
    def __init__(self, d, i):
        super().__init__()
        self.gate_proj = nn.Linear(d, i, bias=False)
        self.up_proj = nn.Linear(d, i, bias=False)
        self.down_proj = nn.Linear(i, d, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class KimiTopkRouter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(-1, self.config.hidden_size)
        logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
        scores = logits.sigmoid()
        choice = scores.view(-1, self.config.num_experts) + self.e_score_correction_bias.unsqueeze(0)
        idx = torch.topk(choice, k=self.config.num_experts_per_token, dim=-1, sorted=False)[1]
        w = scores.gather(1, idx)
        w = w / (w.sum(dim=-1, keepdim=True) + 1e-20)
        return idx, w * self.config.routed_scaling_factor


class KimiSparseMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gate = KimiTopkRouter(config)
        self.down = nn.Linear(config.hidden_size, config.routed_hidden, bias=False)
        self.experts = nn.ModuleList(
            [KimiMLP(config.routed_hidden, config.moe_intermediate_size) for _ in range(config.num_experts)]
        )
        self.norm = KimiRMSNorm(config.routed_hidden, config.rms_norm_eps)
        self.up = nn.Linear(config.routed_hidden, config.hidden_size, bias=False)
        self.shared_experts = KimiMLP(config.hidden_size, config.moe_intermediate_size)

    def moe(self, hidden_states, topk_indices, topk_weights):
        final = torch.zeros_like(hidden_states, dtype=topk_weights.dtype)
        expert_mask = F.one_hot(topk_indices, num_classes=len(self.experts)).permute(2, 0, 1)
        for e in range(len(self.experts)):
            expert = self.experts[e]
            mask = expert_mask[e]
            token_indices, weight_indices = torch.where(mask)
            if token_indices.numel() > 0:
                w = topk_weights[token_indices, weight_indices]
                out = expert(hidden_states[token_indices])
                final.index_add_(0, token_indices, out * w.unsqueeze(-1))
        return final.type(hidden_states.dtype)

    def forward(self, hidden_states):
        residual = hidden_states
        shape = hidden_states.shape
        idx, w = self.gate(hidden_states)
        x = self.down(hidden_states.view(-1, shape[-1]))
        x = self.up(self.norm(self.moe(x, idx, w))).view(*shape)
        return x + self.shared_experts(residual)


class KimiAttnRes(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.proj = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, block_residual, prefix):
        values = torch.cat([block_residual, prefix.unsqueeze(-2)], dim=-2) if prefix is not None else block_residual
        logits = self.proj(self.norm(values)).squeeze(-1)
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        return torch.matmul(probs.unsqueeze(-2), values.float()).squeeze(-2).to(values.dtype)


class KimiDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.bs = config.attn_res_block_size
        self.is_linear = layer_idx not in config.full_attn_layers
        self.self_attn = (
            KimiDeltaAttention(config, layer_idx) if self.is_linear else KimiMLAAttention(config, layer_idx)
        )
        self.mlp = (
            KimiMLP(config.hidden_size, config.intermediate_size)
            if layer_idx < config.first_k_dense_replace
            else KimiSparseMoeBlock(config)
        )
        self.input_layernorm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        if layer_idx > 0:
            self.self_attention_res = KimiAttnRes(config)
        self.mlp_res = KimiAttnRes(config)

    def forward(self, prefix, blocks, attention_mask, linear_mask, cache):
        h = self.self_attention_res(blocks, prefix) if blocks is not None else prefix
        if self.layer_idx % self.bs == 0:
            blocks = prefix.unsqueeze(-2) if blocks is None else torch.cat([blocks, prefix.unsqueeze(-2)], dim=-2)
            prefix = None
        h = self.input_layernorm(h)
        if self.is_linear:
            a = self.self_attn(h, linear_mask, cache)
        else:
            a = self.self_attn(h, attention_mask, cache)
        prefix = a if prefix is None else prefix + a
        h = self.post_attention_layernorm(self.mlp_res(blocks, prefix))
        return prefix + self.mlp(h), blocks


class KimiForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([KimiDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.output_res = KimiAttnRes(config)
        self.norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def _update_causal_mask(self, attention_mask, x, past):
        b, s = x.shape[:2]
        total = past + s
        mn = torch.finfo(x.dtype).min
        pos = torch.arange(past, total, device=x.device)
        causal = torch.full((s, total), mn, dtype=x.dtype, device=x.device)
        causal = causal * (torch.arange(total, device=x.device) > pos.reshape(-1, 1))
        causal = causal[None, None].expand(b, 1, -1, -1).clone()
        if attention_mask is not None:
            pm = causal[:, :, :, :total] + attention_mask[:, None, None, :].to(x.dtype)
            causal = causal.masked_fill((attention_mask[:, None, None, :] == 0), mn)
        return causal

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=True):
        if use_cache and past_key_values is None:
            past_key_values = KimiDynamicCache(self.config)
        x = self.embed_tokens(input_ids)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        causal = self._update_causal_mask(attention_mask, x, past)
        prefix, blocks = x, None
        for layer in self.layers:
            prefix, blocks = layer(prefix, blocks, causal, attention_mask, past_key_values)
        past_key_values.seen = past + input_ids.shape[1]
        h = self.norm(self.output_res(blocks, prefix))
        return self.lm_head(h), past_key_values


def build():
    return KimiForCausalLM(KimiConfig())


def drive(call, model, ids):
    out, cache = call(ids, attention_mask=torch.ones_like(ids))
    yield "prefill", out
    nxt = (ids[:, :1] + 3) % 50
    out, cache = call(nxt, attention_mask=torch.ones(2, 13, dtype=torch.long), past_key_values=cache)
    yield "decode", out


expect = dict(
    prefill=dict(kda=2, short_conv=2, gated_rms_norm=2, lightning_indexer=1, sparse=1, router=2, experts=2, attn_res=6),
    decode=dict(kda=2, short_conv=2, gated_rms_norm=2, lightning_indexer=1, sparse=1, router=2, experts=2, attn_res=6),
)
