"""One decoder layer: attention and feed-forward between attention residuals (K3.1 spec 2.1)."""

from torch import Tensor, nn

from k31compile.model.attn_res import AttnRes
from k31compile.model.caches import KdaCache, MlaCache, Step
from k31compile.model.config import K31Config
from k31compile.model.kda import KimiDeltaAttention
from k31compile.model.mla import GatedMLA
from k31compile.model.moe import FeedForward, LatentMoE
from k31compile.model.norms import RMSNorm


class DecoderLayer(nn.Module):
    """Layer l: h = AttnRes -> attention -> AttnRes -> feed-forward; no plain residual (K3.1 spec 2.1)."""

    def __init__(self, config: K31Config, layer: int) -> None:
        """Parameters of layer `layer`, 0-based."""
        super().__init__()
        self.opens_block = layer % config.attn_res_block_size == 0
        if config.is_mla(layer):
            self.self_attn: GatedMLA | KimiDeltaAttention = GatedMLA(config, config.has_indexer(layer))
        else:
            self.self_attn = KimiDeltaAttention(config)
        dense = layer < config.first_k_dense_replace
        self.mlp = FeedForward(config, config.intermediate_size) if dense else LatentMoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_res = AttnRes(config)
        self.mlp_res = AttnRes(config)

    def forward(
        self,
        prefix: Tensor,
        bank: tuple[Tensor, ...],
        cache: KdaCache | MlaCache,
        step: Step,
        selected: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """prefix [B, T, D], the running block sum, and bank, the frozen ones -> both after this layer.

        The first layer of a block freezes the prefix and begins a new one. `selected` passes the indexer's
        choice on to layers that share it.
        """
        h = self.attn_res(prefix, bank)
        x = self.input_layernorm(h)
        if isinstance(self.self_attn, GatedMLA):
            assert isinstance(cache, MlaCache)
            attended, selected = self.self_attn(x, cache, step, selected)
        else:
            assert isinstance(cache, KdaCache)
            attended = self.self_attn(x, cache, step)
        attended = attended.to(prefix.dtype)
        if self.opens_block:
            bank, prefix = (*bank, prefix), attended
        else:
            prefix = prefix + attended
        h = self.mlp_res(prefix, bank)
        fed = self.mlp(self.post_attention_layernorm(h))
        return prefix + fed.to(prefix.dtype), bank, selected
