"""Every implementation of k31::moe_gating_top_k against a definition in Python floats, and against public routers."""

import math
from types import SimpleNamespace

import pytest
import torch

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.kernels.expert_checks import Gating


def rank(value, place):
    """A NaN before everything, then the larger value, then the lower place."""
    return (0, 0.0, place) if math.isnan(value) else (1, -value, place)


def best(values, count):
    return sorted(range(len(values)), key=lambda place: rank(values[place], place))[:count]


def score(row, norm_type):
    if norm_type == 1:
        return [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in row]
    top = max(row)
    parts = [math.exp(x - top) for x in row]
    return [part / sum(parts) for part in parts]


def definition(x, k, bias=None, **options):
    """Row by row in Python; the options have the operator's names and defaults."""
    option = {"k_group": 1, "group_count": 1, "group_select_mode": 1, "group_fill": None, "renorm": True}
    option |= {"norm_type": 1, "routed_scaling_factor": 1.0, "eps": 1e-20} | options
    fill = -math.inf if option["group_fill"] is None else option["group_fill"]
    weights, chosen = [], []
    for row in x.double().tolist():
        scores = score(row, option["norm_type"])
        choice = scores if bias is None else [s + b for s, b in zip(scores, bias.double().tolist(), strict=True)]
        if option["group_count"] > 1:
            size = len(row) // option["group_count"]
            groups = [choice[g : g + size] for g in range(0, len(row), size)]
            taken = 1 + option["group_select_mode"]
            values = [sum(group[i] for i in best(group, taken)) for group in groups]
            kept = best(values, option["k_group"])
            choice = [value if e // size in kept else fill for e, value in enumerate(choice)]
        experts = best(choice, k)
        divisor = sum(scores[e] for e in experts) + option["eps"] if option["renorm"] else 1
        weights.append([scores[e] / divisor * option["routed_scaling_factor"] for e in experts])
        chosen.append(experts)
    shape = (x.shape[0], k)
    return torch.tensor(weights, dtype=torch.float64).view(shape), torch.tensor(chosen, dtype=torch.int32).view(shape)


def draw(rows, experts, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, experts, generator=generator) * 2
    return x.to(dtype), torch.randn(experts, generator=generator) * 0.3


def agree(got, expected, rtol=2e-6):
    assert got[1].dtype == torch.int32
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[0].double(), expected[0], rtol=rtol, atol=1e-37, equal_nan=True)


SIZES = [(2, 5, 3), (3, 1, 1), (17, 33, 4), (2, 32, 6), (5, 130, 11), (2, 896, 16), (2, 29, 29)]  # rows, experts, k
CASES = [
    {},
    {"norm_type": 0},
    {"renorm": False, "routed_scaling_factor": 2.5},
    {"norm_type": 0, "renorm": False},
    {"eps": 0.25, "routed_scaling_factor": 0.7},
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_odd_sizes(gating, size, case, biased):
    rows, experts, k = size
    x, bias = draw(rows, experts)
    bias = bias if biased else None
    agree(gating(x, k, bias=bias, **case), definition(x, k, bias, **case))


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize(("groups", "kept"), [(2, 1), (3, 2), (6, 4), (5, 5)])
@pytest.mark.parametrize("fill", [None, 0.0])
def test_groups(gating, mode, norm_type, groups, kept, fill):
    size = 7
    x, bias = draw(23, groups * size, seed=groups)
    case = {"group_count": groups, "k_group": kept, "group_select_mode": mode, "norm_type": norm_type}
    case["group_fill"] = fill
    for k in (3, kept * size):  # as many as are kept: with 0.0 in the others some of these win
        agree(gating(x, k, bias=bias, **case), definition(x, k, bias, **case))


def test_a_filled_expert_can_win_where_its_author_let_it(gating):
    x, bias = torch.tensor([[3.0, 2.0, -1.0, -2.0]]), torch.tensor([-1.0, -1.2, -1.1, -1.3])
    case = {"bias": bias, "group_count": 2, "k_group": 1, "renorm": False}
    assert gating(x, 2, **case)[1].tolist() == [[0, 1]]
    weights, chosen = gating(x, 2, group_fill=0.0, **case)
    assert chosen.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.sigmoid(x[:, 2:]))  # as gathered from the scores, not the fill
    assert gating(x, 4, **case)[1].tolist() == [[0, 1, 2, 3]]


def test_equal_choices_go_to_the_lower_expert_and_the_lower_group(gating):
    x = torch.zeros(2, 12)
    x[1, 5] = x[1, 9] = 1
    assert gating(x, 4)[1].tolist() == [[0, 1, 2, 3], [5, 9, 0, 1]]
    assert gating(x, 4, group_count=4, k_group=2)[1].tolist() == [[0, 1, 2, 3], [5, 9, 3, 4]]
    assert gating(x.bfloat16(), 12)[1].tolist() == [[*range(12)], [5, 9, 0, 1, 2, 3, 4, 6, 7, 8, 10, 11]]
    filled = gating(x, 3, bias=-torch.sigmoid(x[0]), group_count=4, k_group=1, group_fill=-0.0)[1]
    assert filled[0].tolist() == [0, 1, 2]  # choices of +0 and a fill of -0 are equal


def test_coarse_logits_tie_often_and_always_alike(gating):
    x = draw(40, 64, seed=3)[0].round()
    agree(gating(x, 9), definition(x, 9))
    agree(gating(x, 9, group_count=8, k_group=3), definition(x, 9, group_count=8, k_group=3))


def test_nan_counts_as_the_largest(gating):
    x = torch.tensor([[1.0, 0.0, torch.nan, 2.0, torch.nan, 3.0], [1.0, 0.0, 5.0, 2.0, 4.0, 3.0]])
    weights, chosen = gating(x, 3, renorm=False)
    assert chosen.tolist() == [[2, 4, 5], [2, 4, 5]]
    assert weights.isnan().tolist() == [[True, True, False], [False] * 3]
    bias = torch.tensor([0.0, torch.nan, 0.0, 0.0, 0.0, 0.0])
    weights, chosen = gating(x[1:], 2, bias=bias, renorm=False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.sigmoid(x[1:, 1:3]))
    for mode in (0, 1):
        case = {"group_count": 3, "k_group": 1, "group_select_mode": mode, "bias": bias}
        assert gating(x[1:], 2, **case)[1].tolist() == [[1, 0]]
    assert gating(x[:1], 6, norm_type=0)[1].tolist() == [[*range(6)]]  # one NaN makes every part of a softmax one


def test_saturated_logits(gating):
    x = torch.tensor([[-200.0, 200.0, -torch.inf, torch.inf, 0.0], [-90.0, -200.0, -torch.inf, -1e30, -120.0]])
    weights, chosen = gating(x, 5, renorm=False)
    assert chosen[0].tolist() == [1, 3, 4, 0, 2]
    torch.testing.assert_close(weights[0], torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0]))
    assert torch.equal(gating(x[1:], 2)[0], torch.zeros(1, 2)) or float(weights[1].max()) > 0
    finite = x[:, :2]
    agree(gating(finite, 2, norm_type=0), definition(finite, 2, norm_type=0))


def test_a_row_without_any_score_weighs_nothing(gating):
    weights, _ = gating(torch.full((2, 7), -torch.inf), 3)
    assert torch.equal(weights, torch.zeros(2, 3))


@pytest.mark.parametrize("layout", ["bfloat16", "sliced", "transposed", "strided", "expanded"])
def test_logits_are_read_where_they_lie(gating, layout):
    x, bias = draw(9, 21, seed=5)
    if layout == "bfloat16":
        x, bias = x.bfloat16(), bias.bfloat16()
    elif layout == "sliced":
        x = torch.cat((x, torch.full_like(x, torch.nan), x), 1)[:, 42:]
    elif layout == "transposed":
        x = x.T.contiguous().T
    elif layout == "strided":
        x, bias = torch.stack((x, x + 1), 2)[..., 0], torch.stack((bias, bias), 1)[:, 0]
    else:
        x = x[:1].expand(9, 21)
    agree(gating(x, 4, bias=bias), definition(x, 4, bias))


@pytest.mark.parametrize(("rows", "experts", "k"), [(0, 5, 2), (3, 5, 0), (0, 0, 0), (4, 0, 0)])
def test_empty(gating, rows, experts, k):
    weights, chosen = gating(torch.ones(rows, experts), k)
    assert (weights.shape, weights.dtype) == ((rows, k), torch.float32)
    assert (chosen.shape, chosen.dtype) == ((rows, k), torch.int32)


def test_threads_change_nothing(gating, two_threads):
    x, bias = draw(1501, 96, seed=8)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(gating(x, 7, bias=bias, group_count=8, k_group=3))
    for weights, chosen in results[1:]:
        assert torch.equal(weights, results[0][0])
        assert torch.equal(chosen, results[0][1])


def test_float64_stays_float64():
    x, bias = draw(4, 9)
    for case in ((x.double(), bias), (x, bias.double())):
        weights, chosen = torch.ops.k31.moe_gating_top_k(case[0], 3, bias=case[1])
        assert weights.dtype == torch.float64
        agree((weights, chosen), definition(x, 3, bias), rtol=1e-14)


OPERATOR = torch.ops.k31.moe_gating_top_k.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
def test_opcheck(dtype):
    x, bias = draw(6, 8, dtype)
    case = {"bias": bias, "group_count": 4, "k_group": 2, "group_fill": 0.0}
    for utility in ("test_schema", "test_faketensor"):
        torch.library.opcheck(OPERATOR, (x, 3), case, test_utils=utility)


def test_the_schema_and_the_options_have_the_same_defaults():
    schema = {arg.name: arg.default_value for arg in OPERATOR._schema.arguments if arg.kwarg_only}
    assert schema == Gating._field_defaults


ONES = torch.ones
BAD_CALLS = [
    ({"x": ONES(2, 3, 6)}, r"x must be \[N, E\], not \[2, 3, 6\]"),
    ({"x": ONES(2, 6).int()}, "x must be floating point"),
    ({"bias": ONES(5)}, r"bias must have shape \[6\], not \[5\]"),
    ({"bias": ONES(6).long()}, "bias must be floating point"),
    ({"k": 7}, r"k must be in \[0, 6\], the number of experts, not 7"),
    ({"k": -1}, "k must be in"),
    ({"group_count": 4}, "group_count 4 does not divide 6 experts"),
    ({"group_count": 0}, "group_count must be at least 1, not 0"),
    ({"group_count": 6}, "group_select_mode 1 needs more experts a group than 1"),
    ({"k_group": 2}, r"k_group must be in \[1, group_count = 1\], not 2"),
    ({"k_group": 0}, "k_group must be in"),
    ({"group_select_mode": 2}, "group_select_mode must be 0 or 1, not 2"),
    ({"norm_type": 2}, r"norm_type must be 0 \(softmax\) or 1 \(sigmoid\), not 2"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_bad_calls_are_refused_by_name(gating, changes, message):
    with pytest.raises(OperatorError, match=message):
        gating(**{"x": ONES(2, 6), "k": 2} | changes)


ROUTERS = [  # where it is written, its class, and the options that say the same
    ("kimi_linear", "KimiLinearTopkRouter", {}),
    ("deepseek_v3", "DeepseekV3TopkRouter", {}),
    ("deepseek_v32", "DeepseekV32TopkRouter", {}),
    ("mistral4", "Mistral4TopkRouter", {"norm_type": 0, "group_fill": 0.0}),
    (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {"norm_type": 0, "group_fill": 0.0, "group_select_mode": 0, "renorm": False},
    ),
]


@pytest.mark.parametrize(("family", "name", "options"), ROUTERS, ids=[name for _, name, _ in ROUTERS])
def test_public_routers(family, name, options, transformers_model):
    experts = 24
    config = SimpleNamespace(
        num_experts_per_tok=5,
        num_local_experts=experts,
        num_experts=experts,
        hidden_size=11,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        topk_method="group_limited_greedy",
    )
    router = getattr(transformers_model(family), name)(config)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        router.weight.normal_(generator=generator)
        bias = getattr(router, "e_score_correction_bias", None)
        if bias is not None:
            bias.normal_(0, 0.2, generator=generator)
        logits, weights, chosen = router(torch.randn(37, 11, generator=generator))
    case = {"group_count": 4, "k_group": 2, "routed_scaling_factor": 2.5, "bias": bias} | options
    got, mine = kernels.moe_gating_top_k_reference(logits, 5, **case)
    order = chosen.argsort(dim=1)
    own = mine.argsort(dim=1)
    assert torch.equal(mine.gather(1, own).long(), chosen.gather(1, order))
    torch.testing.assert_close(got.gather(1, own), weights.gather(1, order), rtol=1e-6, atol=0)
