"""Seeded operands for the programs of the corpus, by operator and by name; batch 2, no two sizes alike."""

import math

import torch
from torch.nn.functional import normalize, softplus

B, H, K, V = 2, 3, 6, 10
CHANNELS, TAPS = H * (2 * K + V), 4
HIDDEN, BLOCKS, SLOTS = 9, 3, 5
EXPERTS, GROUPS, KEPT, CHOSEN = 20, 4, 3, 6
# Grouped products want rows of a multiple of 16 bytes.
LATENT, INNER, ROUTED, PICKED = 24, 8, 12, 3
KEYS, INDEX_HEADS, INDEX_WIDTH, BEST_KEYS, PAGE = 36, 3, 10, 5, 4
ATTENDING, CACHED, TURNED, ANSWER = 8, 14, 6, 9
EPS, LOWER_BOUND, FACTOR = 1e-5, -5.0, 2.5
LOG2E = 1.4426950408889634

# What an author keeps in float32 where the streams are bfloat16.
KEPT_WIDE = {"s0", "pool", "g", "g_log2", "beta", "a_log", "dt_bias", "conv_weight", "norm_weight"}
KEPT_WIDE |= {"query", "res_norm", "next_query", "next_norm", "router", "bias", "low_bias", "logits", "weights"}

LAYOUTS = {
    "bhtd": lambda x: x.transpose(1, 2).contiguous(),
    "tbhd": lambda x: x.transpose(0, 1).contiguous(),
    "sbd": lambda x: x.transpose(0, 1).contiguous(),
    "bs1d": lambda x: x.unsqueeze(2),
    "bct": lambda x: x.transpose(1, 2).contiguous(),
    "one": lambda x: x[:, 0],
    "flat": lambda x: x.flatten(-2),
    "vk": lambda x: x.mT.contiguous(),
    "io": lambda x: x.mT.contiguous(),
    "any": lambda x: x,
    "list": lambda x: list(x.unbind(0)),
    "btnd": lambda x: x.movedim(0, 2).contiguous(),
}


def lay(made, name):
    """The entry of `made` called `name`, in the layout that the name ends with."""
    if name in made:
        return made[name]
    plain, _, layout = name.rpartition("_")
    return LAYOUTS[layout](made[plain])


def make(operator, length, seed):
    """Every operand of `operator` for `length` tokens, by name, in float64 and in the usual layout."""
    draw = _Draw(seed)
    return MAKERS[operator](draw, length)


def operands(program, length, dtype=torch.float64, seed=0):
    """The arguments of a program, fresh."""
    made = rounded(make(program.operator, length, seed), dtype)
    return [_copy(lay(made, name)) for name in program.arguments]


def rounded(made, dtype):
    """The operands as an author would hold them: streams in `dtype`, states, gates, small weights at least float32."""
    wide = torch.promote_types(dtype, torch.float32)

    def cast(name, x):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return x.to(wide if name in KEPT_WIDE else dtype)

    return {name: cast(name, x) for name, x in made.items()}


def _copy(x):
    if isinstance(x, list):
        return [item.clone() for item in x]
    return x.clone() if isinstance(x, torch.Tensor) else x


class _Draw:
    """Random float64 tensors from one seed."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def between(self, low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def magnitudes(self, low, high, *shape):
        """Powers of ten from 10^low to 10^high, evenly spaced and in any order: the smallest is always there."""
        steps = torch.linspace(low, high, math.prod(shape), dtype=torch.float64)
        return 10 ** steps[torch.randperm(len(steps), generator=self.generator)].view(shape)

    def choice(self, rows, count, few):
        """`few` different numbers below `count` in each of `rows` rows."""
        return torch.rand(rows, count, generator=self.generator).argsort(-1)[:, :few].contiguous()

    def integers(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.generator)

    def pages(self, rows, spare=3):
        """Pages [blocks, PAGE, ..] that hold `rows` [B, S, ..] in any order, the first unused; and their table."""
        blocks = rows.unflatten(1, (-1, PAGE)).flatten(0, 1)
        places = 1 + torch.randperm(len(blocks) + spare - 1, generator=self.generator)[: len(blocks)]
        pages = rows.new_zeros(len(blocks) + spare, *blocks.shape[1:])
        pages[places] = blocks
        return pages, places.view(rows.shape[0], -1)


def kda(draw, t):
    """The delta rule: unit keys, decays from mild to strong in every head, and the raw values before the gates."""
    g = -draw.between(-4.0, 0.7, B, t, H, K).exp()
    pool_rows = torch.tensor([3, 1])
    made = {
        "q": draw.normal(B, t, H, K),
        "k": normalize(draw.normal(B, t, H, K), dim=-1),
        "v": draw.normal(B, t, H, V),
        "g": g,
        "g_log2": g * LOG2E,
        "beta": torch.sigmoid(draw.normal(B, t, H)),
        "s0": draw.normal(B, H, K, V),
        "raw_q": draw.normal(B, t, H, K) * 3,
        "raw_k": draw.normal(B, t, H, K) * 3,
        "raw_g": draw.normal(B, t, H, K),
        "raw_beta": draw.normal(B, t, H),
        "a_log": draw.between(-1.0, 0.5, H),
        "dt_bias": draw.normal(H, K),
        "gv": -softplus(draw.normal(B, t, H, V)),
        "erase": normalize(draw.normal(B, t, H, K), dim=-1),
    }
    pool = draw.normal(5, H, V, K)
    pool[pool_rows] = made["s0"].mT
    return made | {"pool": pool, "rows": pool_rows}


def short_conv(draw, t):
    """x [B, T, C], one tap row a channel [C, W], the inputs before x: the last W - 1 or the last W."""
    full = draw.normal(B, TAPS, CHANNELS)
    return {
        "x": draw.normal(B, t, CHANNELS),
        "conv_weight": draw.normal(CHANNELS, TAPS),
        "conv_state": full[:, 1:].contiguous(),
        "conv_full": full,
    }


def gated_rms_norm(draw, t):
    """x and gate [B, T, H, V], rows of all magnitudes: in some eps is most of the mean square."""
    return {
        "x": draw.normal(B, t, H, V) * draw.magnitudes(-3.0, 1.0, B, t, H, 1),
        "gate": draw.normal(B, t, H, V),
        "norm_weight": 1 + 0.3 * draw.normal(V),
    }


def attn_res(draw, t):
    """Frozen block sums [N, B, T, D], also in a longer buffer of zeros; the running sum; two sub-layers' weights."""
    bank = draw.normal(BLOCKS, B, t, HIDDEN) * draw.magnitudes(-3.0, 0.5, BLOCKS, B, t, 1)
    buffer = torch.zeros(SLOTS, B, t, HIDDEN, dtype=torch.float64)
    buffer[:BLOCKS] = bank
    return {
        "bank": bank,
        "buffer": buffer,
        "valid": BLOCKS,
        "prefix": draw.normal(B, t, HIDDEN) * 2,
        "delta": draw.normal(B, t, HIDDEN),
        "query": draw.normal(1, HIDDEN),
        "res_norm": 1 + 0.3 * draw.normal(HIDDEN),
        "next_query": draw.normal(1, HIDDEN),
        "next_norm": 1 + 0.3 * draw.normal(HIDDEN),
        "norm_weight": 1 + 0.3 * draw.normal(HIDDEN),
    }


def moe_gating_top_k(draw, t):
    """Tokens [B, T, D], a router [E, D] and its bias [E]; no two scores of a row alike."""
    x, router, bias = draw.normal(B, t, HIDDEN), draw.normal(EXPERTS, HIDDEN) * 0.5, draw.normal(EXPERTS) * 0.3
    logits = x.flatten(0, 1) @ router.mT
    # With the low bias most choices are below 0, where a mask of zeros is no mask.
    return {"x": x, "router": router, "bias": bias, "low_bias": bias - 1.0, "logits": logits}


def grouped_experts(draw, t):
    """Tokens [B * T, L], k experts and weights each; gate and up packed [E, 2 I, L], down [E, L, I].

    `ranked` [B * T, E] is greatest at the experts of each token, in their order. Products reach 20 and more: there the
    bounds of SiTU are far from straight.
    """
    rows = B * t
    gate_up, down = draw.normal(ROUTED, 2 * INNER, LATENT) * 2, draw.normal(ROUTED, LATENT, INNER)
    gate, up = gate_up.chunk(2, dim=1)
    y, experts = draw.normal(rows, LATENT), draw.choice(rows, ROUTED - 1, PICKED)
    falling = torch.arange(PICKED, 0, -1.0).expand(rows, -1)
    return {
        "y": y,
        "experts": experts,
        "ranked": torch.zeros(rows, ROUTED).scatter(1, experts.long(), falling),
        "weights": draw.between(0.1, 1.0, rows, PICKED),
        "gate_up": gate_up,
        "gate": gate.contiguous(),
        "up": up.contiguous(),
        "down": down,
        "expert_bias": draw.normal(ROUTED, LATENT),
    }


def lightning_indexer(draw, t):
    """Queries and weights [B, T, H, ...] at the end of caches of their own lengths; keys also behind a block table."""
    start = draw.integers(0, KEYS - t + 1, B)
    keys = draw.normal(B, KEYS, INDEX_WIDTH)
    pages, table = draw.pages(keys)
    return {
        "q": draw.normal(B, t, INDEX_HEADS, INDEX_WIDTH),
        "k": keys,
        "w": draw.normal(B, t, INDEX_HEADS),
        "pages": pages,
        "table": table,
        "pos": start[:, None] + torch.arange(t),
        "start": start,
        "lens": start + t,
    }


def sparse_flash_attention(draw, t):
    """An indexer's operands and what it chooses; queries, and caches of latents and of turned parts, or of each head.

    The first batch row begins its cache, so that some tokens see fewer keys than are chosen.
    """
    index = {f"index_{name}": x for name, x in lightning_indexer(draw, t).items()}
    pos = index["index_pos"]
    pos[0] = torch.arange(t)
    dots = torch.einsum("bthd,bsd->bths", index["index_q"], index["index_k"]).relu()
    scores = (dots * index["index_w"].unsqueeze(-1)).sum(2).masked_fill(torch.arange(KEYS) > pos[..., None], -torch.inf)
    cache, turned = draw.normal(B, KEYS, CACHED), draw.normal(B, KEYS, TURNED)
    latent, rope = draw.normal(B, t, ATTENDING, CACHED), draw.normal(B, t, ATTENDING, TURNED)
    head_keys, head_values = draw.normal(B, KEYS, ATTENDING, CACHED), draw.normal(B, KEYS, ATTENDING, ANSWER)
    joint = torch.cat([cache, turned], -1)
    joint_pages, joint_table = draw.pages(joint)
    return index | {
        "pos": pos,
        "chosen": scores.sort(dim=-1, descending=True, stable=True).indices[..., :BEST_KEYS].contiguous(),
        "q_latent": latent,
        "q_rope": rope,
        "q_joint": torch.cat([latent, rope], -1),
        "cache": cache,
        "rope_cache": turned,
        "joint_cache": joint,
        "joint_pages": joint_pages,
        "joint_table": joint_table,
        "head_keys": head_keys,
        "head_values": head_values,
    }


def mega_kda(draw, t):
    """All that a KDA layer hands to its core: the packed stream, both states, raw gates, the output gate and norm."""
    conv, norm = short_conv(draw, t), gated_rms_norm(draw, t)
    return kda(draw, t) | conv | {"qkv": conv["x"], "out_gate": norm["gate"], "norm_weight": norm["norm_weight"]}


MAKERS = {
    "kda_recurrent": kda,
    "kda_chunk": kda,
    "short_conv": short_conv,
    "gated_rms_norm": gated_rms_norm,
    "attn_res": attn_res,
    "moe_gating_top_k": moe_gating_top_k,
    "grouped_experts": grouped_experts,
    "mega_kda": mega_kda,
    "lightning_indexer": lightning_indexer,
    "sparse_flash_attention": sparse_flash_attention,
}
