"""The whole model: embedding, decoder layers, output mixture, vocabulary (K3.1 spec 2.1)."""

import torch
from torch import Tensor, nn

from k31compile.model.attn_res import AttnRes, residual_dtype
from k31compile.model.caches import Caches, make_step
from k31compile.model.config import K31Config
from k31compile.model.decoder import DecoderLayer
from k31compile.model.norms import RMSNorm, accumulate_dtype


class K31Model(nn.Module):
    """Tokens to hidden states (K3.1 spec 2.1)."""

    def __init__(self, config: K31Config) -> None:
        """Parameters of embedding, layers and output mixture."""
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.output_res = AttnRes(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, caches: Caches, start: Tensor, lengths: Tensor | None = None) -> Tensor:
        """tokens int64 [B, T] -> hidden states [B, T, D] in the stream dtype; see K31ForCausalLM.forward."""
        step = make_step(caches, tokens.shape[1], start, lengths)
        embedded = self.embed_tokens(tokens)
        prefix = embedded.to(residual_dtype(self.config, embedded.dtype))
        bank: tuple[Tensor, ...] = ()
        selected = None
        for layer, cache in zip(self.layers, caches.layers, strict=True):
            prefix, bank, selected = layer(prefix, bank, cache, step, selected)
        hidden: Tensor = self.norm(self.output_res(prefix, bank))
        return hidden


class K31ForCausalLM(nn.Module):
    """Kimi K3.1 Pro: `logits = model(tokens, caches, start, lengths)`.

    `weights_source` is the folder that the weights were loaded from, None where they come from a seed.
    """

    weights_source: str | None = None

    def __init__(self, config: K31Config, seed: int = 0) -> None:
        """Build the model and, unless it stands on the meta device, initialise it from `seed`."""
        super().__init__()
        self.config = config
        self.model = K31Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if self.lm_head.weight.device.type != "meta":
            self.init_weights(seed)

    def forward(self, tokens: Tensor, caches: Caches, start: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits of every token of this call; the caches are updated in place.

        tokens int64 [B, T]; start int [B], the number of tokens of each request already in the caches;
        lengths int [B], how many of the T tokens are valid, the rest being padding, or None: all of them.
        Returns [B, T, vocab] in float32, float64 for a float64 model. Rows of padding are finite and mean
        nothing. A request at start 0 needs zeroed states (`Caches.reset`) and start + lengths may not exceed
        `caches.capacity` (`Caches.check_room`).
        """
        logits: Tensor = self.lm_head(self.model(tokens, caches, start, lengths))
        return logits.to(accumulate_dtype(logits.dtype))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill all parameters from `seed`, the same on every machine: products keep the size of their input.

        Matrices are normal with variance 1 / fan-in, norms one, biases zero. Decay rates and biases spread
        heads and channels over short and long memories.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            leaf = name.rpartition(".")[2]
            if leaf == "A_log":
                parameter.copy_(torch.empty(parameter.shape).uniform_(0.5, 2.0, generator=generator).log())
            elif leaf == "dt_bias":
                parameter.copy_(torch.empty(parameter.shape).uniform_(-5.0, 0.0, generator=generator))
            elif parameter.dim() > 1:
                fan_in = 1 if name.endswith("embed_tokens.weight") else parameter.shape[-1]
                values = torch.empty(parameter.shape).normal_(std=fan_in**-0.5, generator=generator)
                parameter.copy_(values)

    def to_serving_dtype(self, dtype: torch.dtype) -> "K31ForCausalLM":
        """Convert to `dtype` in place, except what a checkpoint keeps in float32 (K3.1 spec 1.1, 2.19).

        Those are conv weights, A_log, dt_bias, o_norm, router weight and bias, and the index key norm. With
        float64 everything is converted, as by `double()`.
        """
        kept = accumulate_dtype(dtype)
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                keep = name in getattr(module, "float32_parameters", ())
                parameter.data = parameter.data.to(kept if keep else dtype)
        return self


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, also of a model on the meta device."""
    return sum(parameter.numel() for parameter in model.parameters())
