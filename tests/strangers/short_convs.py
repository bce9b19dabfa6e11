"""Short convolutions, as four people write them."""

import torch
import torch.nn.functional as F
from stranger import Stranger
from torch import nn


# 1. A state-space model's prefill: nn.Conv1d pads both sides, the tail is cut, the state is a padded slice.
class SsmPrefill(nn.Module):
    def __init__(self, d_model=12, d_inner=18, d_conv=4):
        super().__init__()
        self.in_proj = nn.Linear(d_model, d_inner)
        self.conv1d = nn.Conv1d(d_inner, d_inner, d_conv, groups=d_inner, padding=d_conv - 1, bias=True)
        self.act = nn.SiLU()
        self.d_conv = d_conv
        self.out_proj = nn.Linear(d_inner, d_model)

    def forward(self, hidden_states):
        seqlen = hidden_states.shape[1]
        x = self.in_proj(hidden_states).transpose(1, 2)
        conv_state = F.pad(x, (self.d_conv - x.shape[-1], 0))
        x = self.act(self.conv1d(x)[..., :seqlen])
        return self.out_proj(x.transpose(1, 2)), conv_state


# 2. The update everybody copies: the state is rolled in place, the newest input is written, a product is summed.
class RolledDecode(nn.Module):
    def __init__(self, dim=14, width=4):
        super().__init__()
        self.proj = nn.Linear(dim, dim, bias=False)
        self.weight = nn.Parameter(torch.randn(dim, width))
        self.bias = nn.Parameter(torch.randn(dim))

    def forward(self, x, conv_state):
        dtype_in = x.dtype
        x = self.proj(x)
        conv_state.copy_(torch.roll(conv_state, shifts=-1, dims=-1))
        conv_state[:, :, -1] = x
        out = torch.sum(conv_state * self.weight, dim=-1)
        out += self.bias
        return F.silu(out).to(dtype=dtype_in)


# 3. A model file's update: cat, the state copied in place, conv1d, the last rows.
class CopiedDecode(nn.Module):
    def __init__(self, hidden_size=10, conv_dim=22, kernel=4):
        super().__init__()
        self.in_proj = nn.Linear(hidden_size, conv_dim, bias=False)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, kernel, groups=conv_dim, bias=False, padding=kernel - 1)

    def forward(self, hidden_states, conv_state):
        mixed = self.in_proj(hidden_states).transpose(1, 2)
        _, hidden_size, seq_len = mixed.shape
        state_len = conv_state.shape[-1]
        hidden_states_new = torch.cat([conv_state, mixed], dim=-1).to(self.conv1d.weight.dtype)
        conv_state.copy_(hidden_states_new[:, :, -state_len:])
        out = F.conv1d(hidden_states_new, self.conv1d.weight, None, padding=0, groups=hidden_size)
        out = F.silu(out[:, :, -seq_len:])
        return out.transpose(1, 2)


# 4. From JAX: shifted slices times a kernel [W, C], the cache is [B, W - 1, C], everything returned.
class ShiftedConv(nn.Module):
    def __init__(self, features=16, kernel_size=3):
        super().__init__()
        self.kernel_size = kernel_size
        self.dense = nn.Linear(features, features)
        self.kernel = nn.Parameter(torch.randn(kernel_size, features))

    def forward(self, x, cache):
        x = self.dense(x)
        T = x.shape[1]
        x_padded = torch.concatenate([cache, x], dim=1)
        output = torch.zeros_like(x)
        for k in range(self.kernel_size):
            output = output + x_padded[:, k : k + T, :] * self.kernel[k]
        new_cache = x_padded[:, x_padded.shape[1] - (self.kernel_size - 1) :, :]
        return output * torch.sigmoid(output), new_cache


ONE = {"short_conv": 1}
STRANGERS = [
    Stranger("ssm_prefill", lambda: (SsmPrefill(), (torch.randn(2, 7, 12),)), ONE),
    Stranger("rolled_in_place", lambda: (RolledDecode(), (torch.randn(3, 14), torch.randn(3, 14, 4))), ONE),
    Stranger("copied_state", lambda: (CopiedDecode(), (torch.randn(2, 1, 10), torch.randn(2, 22, 4))), ONE),
    Stranger("shifted_slices", lambda: (ShiftedConv(), (torch.randn(2, 5, 16), torch.randn(2, 2, 16))), ONE),
]
