"""Every number of pico's training in one record, and the model that it describes."""

from dataclasses import dataclass

import torch
from torch import nn

from k31compile.model import K31Config, K31ForCausalLM
from k31compile.model.indexer import LightningIndexer

CONTEXT = 512
CONFIG = K31Config(
    num_hidden_layers=6, hidden_size=128, vocab_size=256, max_position_embeddings=4096,
    full_attention_layers=(3, 6), kda_num_heads=4, kda_key_dim=32, kda_value_dim=32, kda_gate_rank=32,
    num_attention_heads=4, q_lora_rank=64, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    attn_res_block_size=2, intermediate_size=384, num_experts=16, num_experts_per_token=2, num_shared_experts=1,
    routed_expert_hidden_size=64, moe_intermediate_size=96, index_n_heads=4, index_head_dim=64, index_topk=32,
    page_size=64,
)  # fmt: skip
"""The model as it is shipped; `for_training` has the same parameters in forms that are quicker to differentiate."""


def for_training(config: K31Config) -> K31Config:
    """The same model with dense attention under a mask, anchored chunks and one matrix product per expert."""
    return config.replace(mla_form="native", kda_pairwise="anchored", moe_form="grouped")


@dataclass(frozen=True)
class Recipe:
    """Sizes and rates of a training run; steps count, never seconds, so that a run can be repeated.

    sparse_from
        share of the steps after which attention reads only what the indexer selects.
    lookup_until, lookup_weight, lookup_heads
        share of the steps in which `lookup_heads` heads of every MLA layer are taught to look up repetitions; the
        weight falls linearly to 0.
    indexer_every, lookup_every
        only every so many steps the indexers learn, and the lookup is taught; both are dear.
    indexer_steps
        steps after the end in which only the indexers learn.
    """

    steps: int = 1600
    indexer_steps: int = 120
    rows: int = 4
    context: int = CONTEXT
    seed: int = 0
    warm_up: int = 40
    decay_from: float = 0.5
    sparse_from: float = 0.7
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    indexer_rate: float = 1e-2
    bias_rate: float = 1e-2
    clip: float = 1.0
    lookup_weight: float = 0.5
    lookup_until: float = 0.5
    lookup_heads: int = 2
    lookup_every: int = 2
    indexer_every: int = 2

    def factor(self, step: int) -> float:
        """Factor of the learning rates: a linear warm-up, constant, and linear to 0 at the end."""
        left = (self.steps - step) / (self.steps * (1 - self.decay_from))
        return min(1.0, (step + 1) / self.warm_up, max(left, 0.0))

    def indexer_factor(self, step: int) -> float:
        """The same for the indexers, whose rate falls only in the steps that are theirs alone."""
        left = (self.steps + self.indexer_steps - step) / max(1, self.indexer_steps)
        return min(1.0, (step + 1) / self.warm_up, left)

    def trains_indexer(self, step: int) -> bool:
        """Whether the indexers learn at a step."""
        return step >= self.steps or step % self.indexer_every == 0

    def is_sparse(self, step: int) -> bool:
        """Whether attention reads only what the indexers select."""
        return step >= self.sparse_from * self.steps

    def lookup(self, step: int) -> float:
        """Weight of the lookup loss at a step."""
        if step % self.lookup_every:
            return 0.0
        return self.lookup_weight * max(0.0, 1 - step / (self.lookup_until * self.steps))


def build_model(config: K31Config, seed: int) -> K31ForCausalLM:
    """The model of a training run at step 0, initialised as `K31ForCausalLM` does, but for what follows.

    Gates begin log-uniform between -0.002 and -0.5, a memory of 2 to 500 tokens; mixtures over depth begin uniform;
    the head begins small, so that the first loss is near 8 bits.
    """
    model = K31ForCausalLM(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.02, generator=generator)
        for name, parameter in model.named_parameters():
            if name.endswith(("_res.proj.weight", "A_log")):
                parameter.zero_()
            elif name.endswith("dt_bias"):
                gate = torch.empty(parameter.shape).uniform_(-6.2, -0.7, generator=generator).exp()
                parameter.copy_(torch.logit(gate / 5))
    return model


_NO_MATRICES = ("embed_tokens", "lm_head", "_res.proj", "mlp.gate.", ".conv.", ".b_proj.", "dt_bias")


def split_parameters(model: K31ForCausalLM) -> dict[str, list[nn.Parameter]]:
    """Who learns by which optimiser: "muon" the matrices, "indexer" the indexers, "adam" the rest.

    Embedding, head, router, mixture queries, conv taps and the one-column-per-head beta are no maps between
    feature spaces of like size, where orthogonal steps make sense. The router's bias learns by load alone.
    """
    groups: dict[str, list[nn.Parameter]] = {"muon": [], "adam": [], "indexer": []}
    owned = {id(p) for module in model.modules() if isinstance(module, LightningIndexer) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            continue
        if id(parameter) in owned:
            groups["indexer"].append(parameter)
        elif parameter.dim() < 2 or any(part in name for part in _NO_MATRICES):
            groups["adam"].append(parameter)
        else:
            groups["muon"].append(parameter)
    return groups
