"""What runs on an NPU where torch_npu has no operator: each formula against its operator's definition, in float64."""

import pytest
import torch

import k31compile.targets.ascend.lowerings  # noqa: F401  (registers them)
from k31compile.kernels.registry import OPERATORS
from k31compile.targets.ascend.decompositions import OURS, coordinates_along
from k31compile.targets.ascend.lowerings.registry import FORMULA, LOWERINGS, choose
from k31compile.targets.ascend.plain_formulas import OURS as PLAIN
from k31compile.targets.ascend.profiles import PROFILES
from k31compile.targets.ascend.writes import unravel

A3 = PROFILES["ascend-a3"]
BOUND = 1e-12


class Draw:
    """Seeded float64 tensors of any shape."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.generator)


def formula_of(operator):
    (found,) = [one for one in LOWERINGS[operator] if one.provider == FORMULA]
    return lambda *args, **kwargs: found.run(A3, *args, **kwargs)


def hold(operator, *args, **kwargs):
    """Formula and definition agree on dtype, shape and value; NaN and infinities where the other has them."""
    got, expected = formula_of(operator)(*args, **kwargs), OPERATORS[operator].reference(*args, **kwargs)
    pairs = zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]
    for one, other in pairs:
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        bound = BOUND if other.dtype == torch.float64 else 1e-2 if other.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weight_cast", ["before", "after", "between"])
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_gated_rms_norm(activation, weight_cast, dtype):
    draw = Draw()
    x, gate, weight = (t.to(dtype) for t in (draw(2, 3, 5, 7), draw(2, 3, 5, 7), draw(7)))
    hold("gated_rms_norm", x, gate, weight, eps=1e-5, activation=activation, weight_cast=weight_cast)


def test_gated_rms_norm_after_the_gate():
    draw = Draw()
    hold("gated_rms_norm", draw(4, 7), draw(4, 7), draw(7), eps=1e-5, activation="silu", norm_before_gate=False)


@pytest.mark.parametrize("blocks", [0, 1, 5])
def test_attn_res_prepare(blocks):
    draw = Draw()
    hold("attn_res_prepare", draw(6, blocks, 11), draw(3, 11), eps=1e-5)


@pytest.mark.parametrize("valid", [[True, False, True], [False] * 3, 0, 2])
def test_attn_res_prepare_where_some_blocks_do_not_count(valid):
    draw = Draw()
    bank = draw(4, 3, 11)
    bank[:, 1 if valid != 2 else 2] = torch.nan  # what does not count is not read
    hold("attn_res_prepare", bank, draw(2, 11), eps=1e-5, valid=torch.tensor(valid))


@pytest.mark.parametrize("mix", [True, False])
def test_attn_res_prepare_of_several_banks(mix):
    draw = Draw()
    banks = [draw(4, blocks, 11) for blocks in (2, 0, 3)]
    valid = torch.tensor([True, False, True, True, False])
    hold("attn_res_prepare", banks[0], draw(2, 11), eps=1e-5, more=banks[1:], mix=mix, valid=valid)
    hold("attn_res_prepare", banks[1], draw(2, 11), eps=1e-5, mix=mix)


@pytest.mark.parametrize("blocks", [(), (3,), (2, 0, 3)])
def test_attn_res_update_from_the_bank(blocks):
    draw = Draw()
    banks = [draw(5, count, 11) for count in blocks]
    weights = draw(5, sum(blocks)).abs()
    if blocks:
        weights[1] = 0
        banks[0][1] = torch.nan  # what has no weight is not read
    hold("attn_res_update", draw(5, 11), None, draw(5), draw(5).abs(), weights, draw(11), eps=1e-5, bank=banks)
    many = draw(5, 3), draw(5, 3).abs(), torch.stack([weights + 1, weights, weights + 2], 1)
    hold("attn_res_update", draw(5, 11), None, *many, draw(11), eps=1e-5, bank=banks, slot=1)


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("with_norm", [True, False])
def test_attn_res_update(with_delta, with_norm):
    draw = Draw()
    prepared = OPERATORS["attn_res_prepare"].reference(draw(5, 2, 11), draw(1, 11), eps=1e-5)
    maximum, total, mixture = (x[:, 0] for x in prepared)
    hold(
        "attn_res_update", draw(5, 11), draw(5, 11) if with_delta else None, maximum, total, mixture, draw(11),
        eps=1e-5, norm_weight=draw(11) if with_norm else None,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("operator", ["kda_recurrent", "gated_delta_recurrent"])
def test_delta_rule(operator, layout, tokens):
    draw = Draw()
    gate = -draw(2, tokens, 3, 5).abs() if operator == "kda_recurrent" else -draw(2, tokens, 3).abs()
    state = draw(2, 3, 5, 7) if layout == "KV" else draw(2, 3, 7, 5)
    hold(
        operator, draw(2, tokens, 3, 5), draw(2, tokens, 3, 5), draw(2, tokens, 3, 7), gate,
        torch.sigmoid(draw(2, tokens, 3)), state, scale=0.3, state_layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [None, [0, 3, 5]])
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_short_conv(activation, lengths):
    draw = Draw()
    options = {"bias": draw(6), "state": draw(3, 3, 6), "activation": activation}
    lengths = None if lengths is None else torch.tensor(lengths)
    hold("short_conv", draw(3, 5, 6), draw(6, 4), actual_seq_lengths=lengths, **options)
    hold("short_conv", draw(3, 1, 6), draw(6, 4))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_mega_kda(bound, packed):
    draw, heads, width, depth = Draw(), 3, 5, 7
    channels = [heads * width, heads * width, heads * depth]
    channels = [sum(channels)] if packed else channels
    hold(
        "mega_kda", [draw(2, 2, c) for c in channels], [draw(c, 4) for c in channels],
        [draw(2, 3, c) for c in channels], draw(2, 2, heads, width), draw(heads), draw(heads, width),
        draw(2, 2, heads), draw(2, heads, width, depth), draw(2, 2, heads, depth), draw(depth),
        norm_eps=1e-5, lower_bound=bound, beta_factor=2.0, scale=0.4,
    )  # fmt: skip


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize("renorm", [True, False])
def test_moe_gating_top_k(renorm, norm_type, groups):
    draw = Draw()
    options = {"k_group": min(groups, 2), "group_count": groups, "norm_type": norm_type, "renorm": renorm}
    hold("moe_gating_top_k", draw(6, 12), 4, bias=draw(12), routed_scaling_factor=2.5, **options)


@pytest.mark.parametrize("activation", ["situ", "swiglu"])
@pytest.mark.parametrize("stacked", [True, False])
def test_grouped_experts(stacked, activation):
    draw = Draw()
    gate, up, down = draw(5, 4, 6), draw(5, 4, 6), draw(5, 7, 4)
    chosen = draw.integers(-1, 6, 9, 2)
    stacks = [[w] if stacked else list(w) for w in (gate, up, down)]
    hold("grouped_experts", draw(9, 6), chosen, draw(9, 2), *stacks, activation=activation)


def caches(draw, rows=3, paged=True):
    """Pages of a cache [blocks, page, 1, .] in a drawn order, and a block table; or the same without pages."""
    blocks = torch.randperm(8, generator=draw.generator)[:6].view(2, 3)
    return (draw(8, 4, 1, 6), blocks) if paged else (draw(2, 12, 1, 6), None)


@pytest.mark.parametrize("count", [3, 12, 17])
@pytest.mark.parametrize("paged", [True, False])
def test_lightning_indexer(paged, count):
    draw = Draw()
    key, table = caches(draw, paged=paged)
    lengths = torch.tensor([[5, 6, 7], [0, 1, 2]])
    hold(
        "lightning_indexer", draw(2, 3, 4, 6), key, draw(2, 3, 4), actual_seq_lengths_key=lengths, block_table=table,
        layout_key="PA_BSND" if paged else "BSND", sparse_count=count, sparse_mode=0,
    )  # fmt: skip


@pytest.mark.parametrize("order", ["position", "score"])
@pytest.mark.parametrize("with_mask", [True, False])
def test_lightning_indexer_fills_a_row_with_what_it_does_not_see(with_mask, order):
    draw = Draw()
    key, _ = caches(draw, paged=False)
    options = {"mask": draw(2, 3, 12) > 0.5} if with_mask else {"actual_seq_lengths_key": torch.tensor([4, 11])}
    hold(
        "lightning_indexer", draw(2, 3, 4, 6), key, draw(2, 3, 4), sparse_count=9, sparse_mode=0, tail="lowest",
        order=order, **options,
    )  # fmt: skip


@pytest.mark.parametrize("paged", [True, False])
def test_sparse_flash_attention(paged):
    draw = Draw()
    key, table = caches(draw, paged=paged)
    rope = draw(*key.shape[:3], 2)
    indices = draw.integers(-1, 12, 2, 3, 1, 5)
    hold(
        "sparse_flash_attention", draw(2, 3, 4, 6), key, key, indices, 0.3, block_table=table,
        actual_seq_lengths_kv=torch.tensor([[5, 6, 7], [0, 1, 12]]), query_rope=draw(2, 3, 4, 2), key_rope=rope,
        layout_kv="PA_BSND" if paged else "BSND", sparse_mode=0,
    )  # fmt: skip


def test_masks_are_kept():
    draw = Draw()
    key, _ = caches(draw, paged=False)
    mask = draw(2, 3, 12) > 0
    hold("lightning_indexer", draw(2, 3, 4, 6), key, draw(2, 3, 4), sparse_count=4, sparse_mode=0, mask=mask)
    indices = draw.integers(0, 12, 2, 3, 1, 5)
    hold("sparse_flash_attention", draw(2, 3, 4, 6), key, key, indices, 0.3, sparse_mode=0, mask=mask.double())


X = Draw(5)(3, 4, 5) * 30
TIED = Draw(6).integers(-3, 3, 4, 9)
ROWS = torch.tensor([2, 0])
HOLES = torch.where(Draw(7)(3, 4, 5) > 1, -torch.inf, X / 30)
ATEN = torch.ops.aten
FORMULAS = [
    (ATEN.softplus.default, (X,)),
    (ATEN.softplus.default, (X, 2.0, 10.0)),
    (ATEN.amax.default, (X, [1])),
    (ATEN.amax.default, (X, [0, -1], True)),
    (ATEN.amax.default, (X,)),
    (ATEN.amin.default, (X, [0, -1], True)),
    (ATEN.amin.default, (TIED, [1])),
    (ATEN.amin.default, (torch.tensor([[-128, 3, 127], [5, 127, -7]], dtype=torch.int8), [1])),
    (ATEN.exp2.default, (X,)),
    (ATEN.add_.Scalar, (X, 3)),
    (ATEN.add_.Scalar, (TIED, 2, 5)),
    (ATEN.add_.Tensor, (X, X[0]), {"alpha": 3}),
    (ATEN.roll.default, (X, [2], [1])),
    (ATEN.roll.default, (X, [-7, 0], [-1, 0])),
    (ATEN.roll.default, (X, [0], [1])),
    (ATEN.roll.default, (X, [11])),
    (ATEN.eye.default, (4,)),
    (ATEN.eye.m, (3, 5)),
    (ATEN.index_copy.default, (X, 0, ROWS, -X[:2])),
    (ATEN.index_copy.default, (X, 1, ROWS, -X[:, :2])),
    (ATEN.cumprod.default, (X / 30, 1)),
    (ATEN.cumprod.default, (X, -1)),
    (ATEN.logcumsumexp.default, (X, 2)),
    (ATEN.logcumsumexp.default, (HOLES, 0)),
    (ATEN.histc.default, (TIED.double(), 6, -3, 3)),
    (ATEN.histc.default, (X, 7, -30, 40)),
    (ATEN.sort.stable, (TIED,), {"stable": True}),
    (ATEN.sort.stable, (TIED,), {"stable": True, "dim": 0, "descending": True}),
]


@pytest.mark.parametrize("case", FORMULAS, ids=lambda case: str(case[0]))
def test_decompositions(case):
    operator, arguments, *options = case
    options = options[0] if options else {}

    def run(call):
        given = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
        return call(*given, **options), given[0]

    (got, left), (expected, wanted) = run(OURS[operator]), run(operator)
    for one, other in [(got, expected), (left, wanted)]:
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_formula_that_is_not_for_a_call_leaves_the_operator():
    assert OURS[ATEN.sort.stable](X, stable=True) is NotImplemented
    assert OURS[ATEN.histc.default](X) is NotImplemented
    assert OURS[ATEN.cumprod.default](TIED, 0) is NotImplemented
    assert OURS[ATEN.amin.default](torch.ones(3, dtype=torch.uint8)) is NotImplemented


def test_every_decomposition_is_tried_here():
    # The others are tried in test_ascend_plain_formulas.py.
    assert set(OURS) - set(PLAIN) == {case[0] for case in FORMULAS}


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_coordinates_of_flat_positions(shape):
    whole = torch.arange(-torch.Size(shape).numel(), torch.Size(shape).numel())
    cells = torch.arange(torch.Size(shape).numel()).view(shape)
    assert torch.equal(cells[tuple(unravel(whole, shape).unbind(1))], cells.flatten()[whole])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_coordinates_along_a_dimension(dim):
    cells, index = torch.arange(60).view(3, 4, 5), torch.tensor([2, 0])
    places = coordinates_along(cells.shape[:dim], index)
    named = cells[tuple(places.unbind(1))]
    assert torch.equal(named, cells.index_select(dim, index).reshape(named.shape))


HALF = {"dtype": torch.bfloat16, "device": "meta"}


def indexer_call(heads=64, width=128, page=128, dtype=torch.bfloat16, count=2048, profile="ascend-a3"):
    query, key = torch.empty(1, 1, heads, width, **HALF), torch.empty(9, page, 1, width, **HALF)
    weights = torch.empty(1, 1, heads, dtype=dtype, device="meta")
    return choose(
        "lightning_indexer", PROFILES[profile], query, key, weights, layout_key="PA_BSND", sparse_count=count,
        block_table=torch.empty(1, 4, dtype=torch.int32, device="meta"),
    )[1]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"width": 64}, "takes index head dim 128, not 64"),
        ({"heads": 65}, "index heads 1 to 64, not 65"),
        ({"heads": 65, "profile": "ascend-950"}, "index heads one of 8, 16, 24, 32, 64, not 65"),
        ({"page": 24}, "block size a multiple of 16"),
        ({"count": 2049}, "sparse_count 1 to 2048, or 3072"),
        ({"dtype": torch.float32, "profile": "ascend-950"}, "weights dtype one of bfloat16, float16, not float32"),
    ],
)
def test_a_broken_constraint_is_named_and_the_formula_taken(change, reason):
    decision = indexer_call(**change)
    assert decision.provider == FORMULA
    assert any(reason in told for told in decision.passed_over), decision.passed_over


FLOAT = torch.float32
ALLOWED = [
    {}, {"dtype": FLOAT}, {"heads": 1}, {"count": 4096}, {"profile": "ascend-950"},
    {"profile": "ascend-950", "heads": 12}, {"profile": "ascend-950", "heads": 21, "dtype": FLOAT},
]  # fmt: skip


@pytest.mark.parametrize("change", ALLOWED)
def test_what_the_documents_allow_is_torch_npus(change):
    decision = indexer_call(**change)
    assert decision.provider == "torch_npu"
    assert not any(told.startswith("torch_npu") for told in decision.passed_over)
    assert "formula: takes this call too, predicted" in decision.passed_over[-1]


def attention_call(heads, profile):
    query, rope = torch.empty(1, 1, heads, 512, **HALF), torch.empty(1, 1, heads, 64, **HALF)
    key, key_rope = torch.empty(9, 128, 1, 512, **HALF), torch.empty(9, 128, 1, 64, **HALF)
    indices = torch.empty(1, 1, 1, 2048, dtype=torch.int32, device="meta")
    return choose(
        "sparse_flash_attention", PROFILES[profile], query, key, key, indices, 0.1, query_rope=rope, key_rope=key_rope,
        layout_kv="PA_BSND",
    )[1]  # fmt: skip


@pytest.mark.parametrize(("profile", "heads"), [("ascend-a3", 96), ("ascend-950", 96), ("ascend-a3", 128)])
def test_heads_of_the_large_model_are_taken(profile, heads):
    assert attention_call(heads, profile).provider == "torch_npu"


def test_more_heads_than_the_product_has_groups_for():
    assert "query heads 1 to 128, not 129" in attention_call(129, "ascend-950").passed_over[0]
