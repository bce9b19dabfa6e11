"""Calls of every operator, drawn at odd sizes, and what may be wrong with one: for comparing two ways to serve them."""

import random

import torch

FLOATS = (torch.float32, torch.bfloat16)


class Draw:
    """Random tensors and choices of one seed."""

    def __init__(self, seed):
        self.choices = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)

    def size(self, most):
        return self.choices.randint(1, most)

    def chance(self, share=0.5):
        return self.choices.random() < share

    def one(self, *allowed):
        return self.choices.choice(allowed)

    def floats(self, *shape, dtypes=FLOATS, readable=True):
        """Numbers of a drawn dtype, now and then a view with gaps; with `readable` the last axis has none."""
        dtype, gap = self.one(*dtypes), self.chance(0.3)
        room = [3 if gap and (dim < len(shape) - 1 or not readable) else 0 for dim in range(len(shape))]
        wide = [size + more for size, more in zip(shape, room, strict=True)]
        view = torch.randn(wide, generator=self.numbers).to(dtype)
        for dim, size in enumerate(shape):
            view = view.narrow(dim, min(1, room[dim]), size)
        if len(shape) > 2 and self.chance(0.3):
            order = [1, 0, *range(2, len(shape))]
            return view.permute(order).contiguous().permute(order)
        return view

    def integers(self, low, high, *shape):
        """Integers in [low, high] of a drawn width, now and then with gaps."""
        dtype = self.one(torch.int64, torch.int32, torch.int64, torch.int16)
        numbers = torch.randint(low, high + 1, (*shape[:-1], shape[-1] * 2), generator=self.numbers).to(dtype)
        return numbers[..., ::2] if self.chance(0.3) else numbers[..., : shape[-1]].contiguous()

    def maybe(self, make, share=0.5):
        return make() if self.chance(share) else None

    def cache(self, batch, heads, *widths):
        """Caches [B, S, N, width] or pages of them, the block table or None, and how many positions a request has."""
        length = self.size(40)
        if self.chance(0.6):
            return [self.floats(batch, length, heads, width) for width in widths], None, length
        page, blocks = self.size(9), self.size(5)
        table = self.integers(0, blocks - 1, batch, self.size(4))
        return [self.floats(blocks, page, heads, width) for width in widths], table, table.shape[1] * page

    def sight(self, batch, rows, limit):
        """Lengths of queries and keys, sparse mode and mask."""
        per_row = self.chance(0.3)
        lengths = self.maybe(lambda: self.integers(0, limit, *((batch, rows) if per_row else (batch,))))
        mode = 0 if per_row else self.one(0, 3)
        sizes = [self.one(1, size) for size in (batch, rows, limit)]
        mask = self.maybe(lambda: self.one(self.floats(*sizes, readable=False), torch.rand(sizes) < 0.7), 0.3)
        return self.maybe(lambda: self.integers(0, rows, batch)), lengths, mode, mask


def lightning_indexer(draw):
    batch, rows, heads, width = draw.size(2), draw.size(5), draw.size(9), draw.size(21)
    (key,), table, limit = draw.cache(batch, 1, width)
    queries, lengths, mode, mask = draw.sight(batch, rows, limit)
    options = {"actual_seq_lengths_query": queries, "actual_seq_lengths_key": lengths, "block_table": table}
    options |= {"layout_key": "BSND" if table is None else "PA_BSND", "sparse_count": draw.size(limit)}
    options |= {"sparse_mode": mode, "mask": mask, "order": draw.one("position", "score")}
    weights = draw.floats(batch, rows, heads, readable=False)
    return (draw.floats(batch, rows, heads, width), key, weights), options | {"tail": draw.one("minus_one", "lowest")}


def sparse_flash_attention(draw):
    batch, rows, groups, width, depth, rope = draw.size(2), draw.size(4), draw.size(2), *map(draw.size, (21, 19, 7))
    heads = groups * draw.size(4)
    (key, value, key_rope), table, limit = draw.cache(batch, groups, width, depth, rope)
    queries, lengths, mode, mask = draw.sight(batch, rows, limit)
    indices = draw.integers(-1, limit - 1, batch, rows, 1, draw.size(9))
    options = {"block_table": table, "actual_seq_lengths_query": queries, "actual_seq_lengths_kv": lengths}
    options |= {"layout_kv": "BSND" if table is None else "PA_BSND", "sparse_mode": mode, "mask": mask}
    if draw.chance():
        options |= {"query_rope": draw.floats(batch, rows, heads, rope), "key_rope": key_rope}
    options["attention_mode"] = 0 if groups > 1 else draw.one(0, 2)
    return (draw.floats(batch, rows, heads, width), key, value, indices, 0.3), options


def _delta(draw, *, scalar, chunk):
    batch, tokens, heads, width, depth = draw.size(2), draw.size(9), draw.size(3), draw.size(21), draw.size(19)
    layout = draw.one("KV", "VK")
    options = {"scale": draw.one(1.0, 0.3), "state_layout": layout}
    sequences = batch
    if chunk and draw.chance(0.4):
        batch, sequences = 1, draw.size(3)
        cuts = sorted(draw.choices.randint(0, tokens) for _ in range(sequences - 1))
        options["cu_seqlens"] = torch.tensor([0, *cuts, tokens], dtype=draw.one(torch.int64, torch.int32))
    query, key = (draw.floats(batch, tokens, heads, width) for _ in range(2))
    gate = draw.floats(batch, tokens, heads, *(() if scalar else (width,))).abs().neg()
    if not scalar and draw.chance(0.2):
        gate = gate[..., :1].expand(-1, -1, -1, width)
    state = draw.floats(sequences, heads, *((width, depth) if layout == "KV" else (depth, width)))
    state = None if chunk and draw.chance(0.3) else state
    beta = draw.floats(batch, tokens, heads, readable=False).sigmoid()
    return (query, key, draw.floats(batch, tokens, heads, depth), gate, beta, state), options


def kda_recurrent(draw):
    return _delta(draw, scalar=False, chunk=False)


def _in_place(draw, call, place):
    """The call with a state that is written to, or a pool of them and which are meant."""
    arguments, options = call
    arguments = [*arguments]
    state = arguments[place].to(draw.one(torch.float32, torch.float32, torch.float32, torch.bfloat16))
    if draw.chance():
        states = state.shape[0] + draw.size(3)
        rows = torch.randperm(states, generator=draw.numbers)[: state.shape[0]] - draw.one(0, 0, states)
        options["rows"] = rows.to(draw.one(torch.int64, torch.int32))
        state = torch.randn(states, *state.shape[1:], generator=draw.numbers).to(state.dtype)
    arguments[place] = state
    return tuple(arguments), options


def kda_recurrent_(draw):
    return _in_place(draw, kda_recurrent(draw), 5)


def kda_chunk(draw):
    return _delta(draw, scalar=False, chunk=True)


def gated_delta_recurrent(draw):
    return _delta(draw, scalar=True, chunk=False)


def gated_delta_chunk(draw):
    return _delta(draw, scalar=True, chunk=True)


def _banks(draw, tokens, width):
    """Frozen sums in one to three banks, and how many there are."""
    banks = [draw.floats(tokens, draw.size(5), width) for _ in range(draw.size(3))]
    return banks, sum(bank.shape[1] for bank in banks)


def attn_res_prepare(draw):
    tokens, width = draw.size(5), draw.size(40)
    (bank, *more), blocks = _banks(draw, tokens, width)
    bools = torch.rand(blocks, generator=draw.numbers) < 0.6
    count = torch.tensor(draw.choices.randint(0, blocks), dtype=draw.one(torch.int64, torch.int32))
    options = {"eps": 1e-6, "valid": draw.one(None, bools, count, count[None])}
    options |= {"more": more or None, "mix": draw.chance()}
    return (bank, draw.floats(draw.size(5), width)), options


def attn_res_update(draw):
    tokens, width = draw.size(5), draw.size(40)
    queries = draw.one(None, draw.size(4))
    slot, all_of = None if queries is None else draw.choices.randrange(queries), () if queries is None else (queries,)
    maximum, total = (draw.floats(tokens, *all_of, dtypes=(torch.float32,), readable=False) for _ in range(2))
    bank, blocks = _banks(draw, tokens, width) if draw.chance() else (None, width)
    mixture = draw.floats(tokens, *all_of, blocks, dtypes=(torch.float32, torch.float32, torch.bfloat16))
    delta, norm = draw.maybe(lambda: draw.floats(tokens, width)), draw.maybe(lambda: draw.floats(width))
    options = {"eps": 1e-6, "norm_weight": norm, "norm_eps": 1e-5, "dtype": draw.one(None, *FLOATS)}
    options |= {"bank": bank, "slot": slot}
    return (draw.floats(tokens, width), delta, maximum, total.abs(), mixture, draw.floats(width)), options


def short_conv(draw):
    batch, tokens, channels, taps = draw.size(3), draw.size(7), draw.size(37), draw.size(5)
    options = {"bias": draw.maybe(lambda: draw.floats(channels, readable=False))}
    options["state"] = draw.maybe(lambda: draw.floats(batch, taps - 1, channels, readable=False))
    options["actual_seq_lengths"] = draw.maybe(lambda: draw.integers(0, tokens, batch))
    options["activation"] = draw.one("silu", "none")
    return (draw.floats(batch, tokens, channels, readable=False), draw.floats(channels, taps, readable=False)), options


def _norm_words(draw):
    cast, first = draw.one(("before", True), ("before", False), ("after", True), ("after", False), ("between", True))
    return {"norm_before_gate": first, "weight_cast": cast, "dtype": draw.one(None, *FLOATS)}


def gated_rms_norm(draw):
    shape = [draw.size(6) for _ in range(draw.size(5) - 1)] + [draw.size(37)]
    weight = shape[-draw.one(1, 2) :]
    options = {"eps": 1e-5, "activation": draw.one("sigmoid", "silu"), **_norm_words(draw)}
    return (draw.floats(*shape), draw.floats(*shape), draw.floats(*weight)), options


def skinny_linear(draw):
    depth, outputs = draw.size(150), draw.size(70)
    rows = draw.one((), (draw.size(8),), (1, draw.size(8)), (draw.size(3), draw.size(3)), (2, 1, draw.size(3), 1))
    dtypes = draw.one((torch.bfloat16,), (torch.bfloat16,), (torch.bfloat16,), (torch.float32,))
    bias = draw.maybe(lambda: draw.floats(outputs, readable=False))
    return (draw.floats(*rows, depth, dtypes=dtypes), draw.floats(outputs, depth, dtypes=dtypes), bias), {}


def mega_kda(draw):
    batch, tokens, heads, width, depth, taps = map(draw.size, (2, 4, 3, 17, 15, 5))
    split = [heads * width, heads * width, heads * depth]
    channels = split if draw.chance() else [sum(split)]
    dtype, kept = draw.one(*FLOATS), draw.one(*FLOATS)
    x = [draw.floats(batch, tokens, count, dtypes=(dtype,), readable=False) for count in channels]
    weight = [draw.floats(count, taps, readable=False) for count in channels]
    state = [draw.floats(batch, taps - 1, count, dtypes=(kept,), readable=False) for count in channels]
    layout = draw.one("KV", "VK")
    bias = draw.maybe(lambda: draw.floats(heads, width))
    inner = (width, depth) if layout == "KV" else (depth, width)
    gates = draw.floats(batch, tokens, heads, width), draw.floats(heads, readable=False), bias
    norm = draw.floats(depth) if draw.chance() else draw.floats(heads, depth)
    beta = draw.floats(batch, tokens, heads, readable=False)
    rest = beta, draw.floats(batch, heads, *inner), draw.floats(batch, tokens, heads, depth), norm
    options = {"norm_eps": 1e-5, "lower_bound": draw.one(None, -5.0, 0.0), "scale": 0.5, "state_layout": layout}
    options |= {"beta_factor": draw.one(1.0, 2.0), "beta_dtype": draw.one(None, *FLOATS), **_norm_words(draw)}
    options |= {"core_dtype": draw.one(None, *FLOATS), "norm_activation": draw.one("sigmoid", "silu")}
    return (x, weight, state if draw.chance() else None, *gates, *rest), options


def mega_kda_(draw):
    return _in_place(draw, mega_kda(draw), 7)


def moe_gating_top_k(draw):
    groups, mode = draw.size(4), draw.one(0, 1)
    experts = groups * (draw.size(5) + 1)
    options = {"bias": draw.maybe(lambda: draw.floats(experts, readable=False)), "group_count": groups}
    options |= {"k_group": draw.size(groups), "group_select_mode": mode, "group_fill": draw.one(None, 0.0)}
    options |= {"renorm": draw.chance(), "norm_type": draw.one(0, 1), "routed_scaling_factor": draw.one(1.0, 2.5)}
    return (draw.floats(draw.size(7), experts), draw.size(experts)), options


def _projection(draw, experts, outputs, inputs, *, packed, transposed, dtype):
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    whole = torch.randn(experts, *shape, generator=draw.numbers).to(dtype)
    whole = whole.mT if transposed else whole
    return [whole] if packed else list(whole.clone(memory_format=torch.preserve_format).unbind())


def grouped_experts(draw):
    rows, width, inner, outputs, experts, slots = map(draw.size, (7, 37, 35, 33, 5, 3))
    packed, transposed, dtype = draw.chance(), draw.chance(), draw.one(*FLOATS)
    form = {"packed": packed, "transposed": transposed, "dtype": dtype}
    gate, up = (_projection(draw, experts, inner, width, **form) for _ in range(2))
    down = _projection(draw, experts, outputs, inner, **form | {"transposed": draw.chance(), "packed": draw.chance()})
    indices = draw.integers(-1, experts, rows, slots)
    options = {"activation": draw.one("situ", "swiglu"), "situ_beta": 3.0, "linear_beta": draw.one(None, 20.0)}
    return (draw.floats(rows, width), indices, draw.floats(rows, slots, readable=False), gate, up, down), options


OPERATORS = {
    make.__name__: make
    for make in (
        lightning_indexer,
        sparse_flash_attention,
        kda_recurrent,
        kda_recurrent_,
        kda_chunk,
        gated_delta_recurrent,
        gated_delta_chunk,
        attn_res_prepare,
        attn_res_update,
        short_conv,
        gated_rms_norm,
        skinny_linear,
        mega_kda,
        mega_kda_,
        moe_gating_top_k,
        grouped_experts,
    )
}
STATES = {"kda_recurrent_": 5, "mega_kda_": 7}
"""Which argument a call writes to."""
WORDS = ("PA_BSND", "BSND", "score", "lowest", "VK", "swiglu", "silu", "after", "no such word")


def spoil(draw, arguments, options):
    """The same call with one thing changed that may make it wrong."""
    places = [*range(len(arguments)), *options]
    place = draw.one(*places)
    given = options[place] if isinstance(place, str) else arguments[place]
    spoilt = _spoilt(draw, given)
    if isinstance(place, str):
        return arguments, options | {place: spoilt}
    return (*arguments[:place], spoilt, *arguments[place + 1 :]), options


def _spoilt(draw, given):
    if isinstance(given, list):
        changed = [*given]
        place = draw.choices.randrange(len(given))
        changed[place] = _spoilt(draw, given[place])
        return draw.one(changed, given[:-1], [*given, given[0]], changed, changed)
    if isinstance(given, torch.Tensor):
        return _spoilt_tensor(draw, given)
    if isinstance(given, str):
        return draw.one(*WORDS)
    if isinstance(given, bool):
        return not given
    if isinstance(given, int):
        return draw.one(-1, 0, 1, 2, 3, given + 1, 1000)
    if isinstance(given, float):
        return draw.one(-1.0, 0.0, float("nan"), float("inf"), 7.0)
    if isinstance(given, torch.dtype):
        return draw.one(torch.float64, torch.float16, torch.int32)
    return draw.one(None, given)


def _spoilt_tensor(draw, tensor):
    wrong = [tensor.double(), tensor.half(), tensor.int(), tensor.long(), tensor > 0, tensor.bfloat16(), tensor.float()]
    wrong += [tensor[None], tensor.flatten(), tensor.sum(), tensor.T if tensor.dim() == 2 else tensor[None, None]]
    for dim, size in enumerate(tensor.shape):
        wrong += [tensor.narrow(dim, 0, 0), torch.cat((tensor, tensor), dim), tensor.transpose(dim, -1)]
        wrong.append(torch.stack((tensor, tensor), dim + 1).select(dim + 1, 0))
        if size:
            wrong += [tensor.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1).expand(tensor.shape)]
    wrong += [tensor + 1000, -tensor] if not tensor.is_floating_point() and tensor.dtype != torch.bool else []
    return draw.one(*wrong, None)
