"""The shape of a K3.1 model: every size and every switch in one frozen record (K3.1 spec 1.1)."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from k31compile.model.errors import ConfigError

_POSITIVE = (
    "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "kda_num_heads",
    "kda_key_dim", "kda_value_dim", "kda_gate_rank", "short_conv_kernel_size", "num_attention_heads",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "attn_res_block_size", "intermediate_size", "num_experts", "num_experts_per_token",
    "routed_expert_hidden_size", "moe_intermediate_size", "num_expert_group", "topk_group",
    "index_n_heads", "index_head_dim", "index_topk", "page_size", "rms_norm_eps", "lora_norm_eps",
    "situ_beta", "routed_scaling_factor", "index_rope_theta",
)  # fmt: skip
_CHOICES = {
    "mla_form": ("absorbed", "native"),
    "attn_res_dtype": ("float32", "stream"),
    "moe_form": ("auto", "gather", "dense", "grouped"),
    "kda_pairwise": ("direct", "anchored"),
}


@dataclass(frozen=True)
class K31Config:
    """Sizes and switches of one K3.1 model; the defaults of the sizes are those of `tiny` (K3.1 spec 1.1).

    full_attention_layers
        1-based numbers of the layers with Gated MLA and sparse attention; all others are KDA.
    gate_lower_bound
        lower bound of the log decay, `lb * sigmoid(..)`; None selects `-exp(A_log) * softplus(..)`.
    kda_pairwise
        "direct" takes the decay between two tokens of a chunk from their difference, safe for every gate;
        "anchored" from two factors, several times faster to train, for gates bounded at -5 or above.
    mla_form
        "absorbed" gathers the selected latent rows; "native" expands all keys and masks. Same result.
    attn_res_dtype
        dtype of the block sums: "float32" (float64 in a float64 model) or "stream" (that of the weights).
    moe_form
        "gather" fetches each token's experts, "dense" runs all experts on all tokens; "auto" takes the
        cheaper one for the number of tokens. Same result, and neither has a shape that depends on data.
        "grouped" sorts the tokens by expert and runs each on its own, for training: its shapes depend on data.
    indexer_types
        one of "full" | "shared" per MLA layer, in order; "shared" reuses the selection of the nearest
        earlier "full" one and has neither an indexer nor index keys. None: all "full".
    situ_linear_beta
        bound of the linear branch of SiTU; None leaves it unbounded.
    """

    num_hidden_layers: int = 5
    hidden_size: int = 64
    vocab_size: int = 256
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    lora_norm_eps: float = 1e-6
    full_attention_layers: tuple[int, ...] = (4, 5)
    kda_num_heads: int = 4
    kda_key_dim: int = 16
    kda_value_dim: int = 16
    kda_gate_rank: int = 16
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = -5.0
    kda_pairwise: str = "direct"
    num_attention_heads: int = 4
    q_lora_rank: int = 32
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 16
    v_head_dim: int = 16
    mla_form: str = "absorbed"
    attn_res_block_size: int = 2
    attn_res_dtype: str = "float32"
    first_k_dense_replace: int = 1
    intermediate_size: int = 96
    num_experts: int = 8
    num_experts_per_token: int = 2
    num_shared_experts: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    moe_renormalize: bool = True
    routed_expert_hidden_size: int = 32
    moe_intermediate_size: int = 32
    latent_moe_use_norm: bool = True
    moe_form: str = "auto"
    situ_beta: float = 4.0
    situ_linear_beta: float | None = 25.0
    index_n_heads: int = 4
    index_head_dim: int = 64
    index_topk: int = 16
    index_rope_dim: int = 0
    index_rope_interleave: bool = False
    index_rope_theta: float = 10000.0
    index_hadamard: bool = False
    indexer_types: tuple[str, ...] | None = None
    page_size: int = 16

    def __post_init__(self) -> None:
        """Refuse a field that no K3.1 model can have, naming the field, its value and what is allowed."""
        for name in _POSITIVE:
            self._require(name, getattr(self, name) > 0, "a number above 0")
        for name, allowed in _CHOICES.items():
            self._require(name, getattr(self, name) in allowed, f"one of {', '.join(allowed)}")
        self._check_layers()
        self._check_experts()
        self._check_indexer()

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"K31Config.{name} = {getattr(self, name)!r}: must be {allowed}")

    def _check_layers(self) -> None:
        layers, last = self.full_attention_layers, self.num_hidden_layers
        ascending = list(layers) == sorted(set(layers)) and all(1 <= layer <= last for layer in layers)
        self._require("full_attention_layers", ascending, f"ascending layer numbers in 1..{last}")
        bound = self.gate_lower_bound
        self._require("gate_lower_bound", bound is None or bound < 0, "a number below 0, or None")
        bounded = bound is not None and bound >= -5
        self._require("kda_pairwise", bounded or self.kda_pairwise == "direct", "direct: no gate_lower_bound of -5..0")
        self._require("first_k_dense_replace", 0 <= self.first_k_dense_replace <= last, f"in 0..{last}")

    def _check_experts(self) -> None:
        experts, groups = self.num_experts, self.num_expert_group
        self._require("num_expert_group", experts % groups == 0, f"a divisor of num_experts = {experts}")
        size = experts // groups
        self._require("num_expert_group", groups == 1 or size >= 2, "1, or leave at least 2 experts a group")
        self._require("topk_group", self.topk_group <= groups, f"at most num_expert_group = {groups}")
        most = size * self.topk_group
        self._require("num_experts_per_token", self.num_experts_per_token <= most, f"at most {most}")
        self._require("num_shared_experts", self.num_shared_experts >= 0, "0 or more")
        bound = self.situ_linear_beta
        self._require("situ_linear_beta", bound is None or bound > 0, "a number above 0, or None")

    def _check_indexer(self) -> None:
        rope, dim = self.index_rope_dim, self.index_head_dim
        self._require("index_rope_dim", 0 <= rope <= dim and rope % 2 == 0, f"an even number in 0..{dim}")
        power_of_two = dim & (dim - 1) == 0
        self._require("index_head_dim", power_of_two or not self.index_hadamard, "a power of two (Hadamard)")
        if self.indexer_types is not None and self.full_attention_layers:
            kinds, count = self.indexer_types, len(self.full_attention_layers)
            fits = len(kinds) == count and set(kinds) <= {"full", "shared"} and kinds[0] == "full"
            self._require("indexer_types", fits, f"{count} times full | shared, beginning with full")

    def is_mla(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) is Gated MLA; else it is KDA."""
        return layer + 1 in self.full_attention_layers

    def has_indexer(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) owns a lightning indexer and index keys."""
        if not self.is_mla(layer):
            return False
        kinds = self.indexer_types
        return kinds is None or kinds[self.full_attention_layers.index(layer + 1)] == "full"

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: q, k and v of every KDA head, side by side."""
        return self.kda_num_heads * (2 * self.kda_key_dim + self.kda_value_dim)

    def replace(self, **changes: object) -> "K31Config":
        """Return a copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @classmethod
    def tiny(cls) -> "K31Config":
        """The test model: 5 layers, 0.37 M parameters (K3.1 spec 1.1)."""
        return cls()

    @classmethod
    def mini(cls) -> "K31Config":
        """The benchmark model: 9 layers, 78.3 M parameters (K3.1 spec 1.1)."""
        return cls(
            num_hidden_layers=9, hidden_size=512, vocab_size=4096, max_position_embeddings=131072,
            full_attention_layers=(4, 8, 9), kda_num_heads=8, kda_key_dim=64, kda_value_dim=64,
            kda_gate_rank=64, num_attention_heads=8, q_lora_rank=192, kv_lora_rank=256, qk_nope_head_dim=64,
            qk_rope_head_dim=64, v_head_dim=64, attn_res_block_size=4, intermediate_size=1536,
            num_experts=32, num_experts_per_token=4, num_shared_experts=2, routed_expert_hidden_size=256,
            moe_intermediate_size=256, index_n_heads=8, index_head_dim=128, index_topk=128, page_size=64,
        )  # fmt: skip

    @classmethod
    def full(cls) -> "K31Config":
        """K3.1 Pro itself: 93 layers, 2.78 T parameters; build it on the meta device (K3.1 spec 1.1)."""
        return cls(
            num_hidden_layers=93, hidden_size=7168, vocab_size=163840, max_position_embeddings=1048576,
            full_attention_layers=(*range(4, 93, 4), 93), kda_num_heads=96, kda_key_dim=128,
            kda_value_dim=128, kda_gate_rank=128, num_attention_heads=96, q_lora_rank=1536,
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            attn_res_block_size=12, intermediate_size=33792, num_experts=896, num_experts_per_token=16,
            num_shared_experts=2, routed_expert_hidden_size=3584, moe_intermediate_size=3072,
            index_n_heads=64, index_head_dim=128, index_topk=2048, page_size=128,
        )  # fmt: skip


CONFIGS: dict[str, Callable[[], K31Config]] = {
    "tiny": K31Config.tiny,
    "mini": K31Config.mini,
    "full": K31Config.full,
}
