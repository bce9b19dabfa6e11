"""Which provider a call gets: installed or not, too old, broken, of another signature; and what is told of it."""

import dataclasses
import importlib
import sys

import pytest
import torch

import k31compile.targets.ascend.lowerings  # noqa: F401  (registers them)
from k31compile.kernels.registry import OPERATORS
from k31compile.targets.ascend import own_operators
from k31compile.targets.ascend.lowerings import registry
from k31compile.targets.ascend.lowerings.registry import FORMULA, LOWERINGS, Lowering, choose
from k31compile.targets.ascend.profiles import PROFILES
from k31compile.targets.ascend.providers import PROVIDERS, why_not

A3 = PROFILES["ascend-a3"]
EAGER = dataclasses.replace(A3, path="npugraph_ex")
HEADS, WIDTH = 2, 128

FAKE = """
import torch
CALLS = []

def recurrent_kda(q, k, v, g, beta, initial_state=None, *, cu_seqlens=None, ssm_state_indices=None, A_log=None,
                  dt_bias=None, num_accepted_tokens=None, layout="BSND", scale=None, output_final_state=False,
                  inplace_final_state=True, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                  use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None,
                  state_v_first=False):
    from k31compile.kernels.kda import kda_recurrent_reference
    assert (layout, output_final_state, inplace_final_state) == ("BSND", True, False)
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    CALLS.append("recurrent")
    o, s = kda_recurrent_reference(q, k, v, g, beta, initial_state, scale=scale,
                                   state_layout="VK" if state_v_first else "KV")
    return o.to(v.dtype), s

def chunk_kda_fwd(q, k, v, g, beta, scale, chunk_size, layout="BSND", initial_state=None, output_final_state=False,
                  cu_seqlens=None, chunk_indices=None, safe_gate=False, lower_bound=None, use_gate_in_kernel=False,
                  A_log=None, dt_bias=None, disable_recompute=False, return_intermediate_states=False,
                  state_v_first=False):
    from k31compile.kernels.kda import kda_chunk_reference
    assert chunk_size == 64
    CALLS.append("chunk")
    o, s = kda_chunk_reference(q, k, v, g, beta, initial_state, scale=scale,
                               state_layout="VK" if state_v_first else "KV")
    return (o.to(v.dtype), s, *[None] * 10)
"""


def operands(tokens, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(tokens)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)  # noqa: E731
    rows = (1, tokens, HEADS)
    q, k, v = unit(draw(*rows, WIDTH)).to(dtype), unit(draw(*rows, WIDTH)).to(dtype), draw(*rows, WIDTH).to(dtype)
    return [q, k, v, -draw(*rows, WIDTH).abs(), torch.sigmoid(draw(*rows)), draw(1, HEADS, WIDTH, WIDTH)]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package fla_npu onto the path: its kernels' text and the version that it is installed as."""

    def put(text, version="26.6.1"):
        folder = tmp_path / "fla_npu" / "ops" / "ascendc"
        folder.mkdir(parents=True)
        for package in (tmp_path / "fla_npu", tmp_path / "fla_npu" / "ops"):
            (package / "__init__.py").write_text("")
        (folder / "__init__.py").write_text(text)
        if version:
            info = tmp_path / f"fla_npu-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fla-npu\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    yield put
    for name in [name for name in sys.modules if name.split(".")[0] == "fla_npu"]:
        del sys.modules[name]


def told_of(decision, provider):
    return next(told for told in decision.passed_over if told.startswith(f"{provider}: "))


def test_a_package_that_is_not_there_is_told_and_never_imported():
    lowering, decision = choose("kda_chunk", EAGER, *operands(70))
    assert decision.provider == lowering.provider == FORMULA
    assert told_of(decision, "fla_npu") == "fla_npu: is not installed"
    assert "one gate a head" in told_of(decision, "torch_npu")
    assert decision.reason == "no provider takes this call"
    assert decision.seconds is not None
    assert "fla_npu" not in sys.modules


def test_a_package_whose_function_is_never_taken_is_not_said_to_be_missing():
    """To install it would help nobody; its own reason is told, as the table of docs/ascend-operators.md does."""
    _, decision = choose("kda_chunk", EAGER, *operands(70))
    assert told_of(decision, "vllm_ascend") == "vllm_ascend: calls fla_npu, which is asked for itself"
    assert told_of(decision, "sgl_kernel_npu").startswith("sgl_kernel_npu: exports parts")


@pytest.mark.parametrize(("operator", "tokens"), [("kda_recurrent", 3), ("kda_chunk", 70)])
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_an_installed_package_is_taken_and_its_arithmetic_is_the_operators(install, operator, tokens, layout):
    install(FAKE)
    args = operands(tokens)
    lowering, decision = choose(operator, EAGER, *args, scale=0.1, state_layout=layout)
    assert decision.provider == "fla_npu"
    assert "the only provider whose constraints hold; calls ops.ascendc." in decision.reason
    assert "predicted" in told_of(decision, FORMULA)
    got = lowering.run(EAGER, *args, scale=0.1, state_layout=layout)
    expected = OPERATORS[operator].reference(*args, scale=0.1, state_layout=layout)
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    assert [operator.split("_")[1]] == sys.modules["fla_npu.ops.ascendc"].CALLS


def test_a_graph_for_ge_passes_over_what_has_no_converter(install):
    install(FAKE)
    _, decision = choose("kda_chunk", A3, *operands(70))
    assert decision.provider == FORMULA
    assert "no GE converter" in told_of(decision, "fla_npu")
    assert "fla_npu.ops.ascendc" not in sys.modules


@pytest.mark.parametrize(
    ("text", "version", "reason"),
    [
        (FAKE, "25.1", "version 25.1 is older than 26.6"),
        (FAKE, "new", "version that cannot be read, 'new'"),
        ("raise OSError('libascendcl.so: cannot open')", "26.6.1", "fails: OSError: libascendcl.so: cannot open"),
        ("x = 1 / 0", "26.6.1", "fails: ZeroDivisionError"),
        ("def recurrent_kda(): pass", "26.6.1", "fails: AttributeError"),
        ("def chunk_kda_fwd(q, k, v): pass", "26.6.1", "other arguments than were seen; it has no beta, chunk_size"),
    ],
)
def test_a_package_that_cannot_be_used_is_passed_over_with_the_reason(install, text, version, reason):
    install(text, version)
    _, decision = choose("kda_chunk", EAGER, *operands(70))
    assert decision.provider == FORMULA
    assert reason in told_of(decision, "fla_npu")


def test_a_package_without_a_version_is_taken(install):
    install(FAKE, version="")
    assert choose("kda_chunk", EAGER, *operands(70))[1].provider == "fla_npu"


def test_operands_in_float32_are_rounded_only_where_that_is_allowed(install):
    install(FAKE)
    args = operands(70, torch.float32)
    _, decision = choose("kda_chunk", EAGER, *args)
    assert decision.provider == FORMULA
    assert "query dtype bfloat16, not float32; cast it to bfloat16" in told_of(decision, "fla_npu")
    rounding = dataclasses.replace(EAGER, may_round=True)
    assert choose("kda_chunk", rounding, *args)[1].provider == "fla_npu"


def test_what_the_kernel_is_not_made_for_is_named(install):
    install(FAKE)
    args = operands(9)
    assert "tokens 1 to 8, not 9; prefill with kda_chunk" in told_of(
        choose("kda_recurrent", EAGER, *args)[1], "fla_npu"
    )
    narrow = [x[..., :64] if x.dim() == 4 else x for x in args[:5]] + [args[5][:, :, :64, :64]]
    assert any("key dim 128, not 64" in told for told in choose("kda_recurrent", EAGER, *narrow)[1].passed_over)


def test_of_several_providers_the_one_of_least_predicted_time_is_taken(monkeypatch):
    never = lambda *_, **__: []  # noqa: E731
    slow, fast = (Lowering("twice", name, lambda *_: None, never, calls) for name, calls in
                  (("torch_npu", "npu_rms_norm"), ("ours", "fast")))  # fmt: skip
    monkeypatch.setitem(LOWERINGS, "twice", [slow, fast])
    profile = dataclasses.replace(A3, own_operators=frozenset({"twice"}))
    monkeypatch.setattr(registry, "_predict", lambda one, *_: {"npu_rms_norm": 3e-6, "fast": 2e-6}[one.calls])
    chosen, decision = choose("twice", profile, torch.ones(1))
    assert chosen is fast
    assert decision.seconds == 2e-6
    assert told_of(decision, "torch_npu") == "torch_npu: takes this call too, predicted 3.0 us against 2.0 us"
    monkeypatch.setattr(registry, "_predict", lambda *_: 2e-6)
    chosen, decision = choose("twice", profile, torch.ones(1))
    assert chosen is slow
    assert "later in the order" in told_of(decision, "ours")


def test_the_layers_core_tells_of_the_recurrence_inside():
    wide = HEADS * WIDTH
    args = ([torch.empty(1, 1, 3 * wide)], [torch.empty(3 * wide, 4)], [torch.empty(1, 3, 3 * wide)],
            torch.empty(1, 1, HEADS, WIDTH), torch.empty(HEADS), torch.empty(HEADS, WIDTH), torch.empty(1, 1, HEADS),
            torch.empty(1, HEADS, WIDTH, WIDTH), torch.empty(1, 1, HEADS, WIDTH), torch.empty(WIDTH))  # fmt: skip
    _, decision = choose("mega_kda", A3, *args, norm_eps=1e-5)
    (part,) = decision.parts
    assert (part.operator, part.provider) == ("kda_recurrent", FORMULA)
    assert "no package with a kernel of it is declared" in told_of(part, "ours")
    assert "keeps no float32 state" in " ".join(part.passed_over)
    declared = dataclasses.replace(A3, own_operators=frozenset({"kda_recurrent"}))
    assert choose("mega_kda", declared, *args, norm_eps=1e-5)[1].parts[0].provider == "ours"


def test_our_operator_steps_rows_of_a_cache_in_place():
    args = operands(3, torch.float32)
    cache = torch.randn(5, HEADS, WIDTH, WIDTH)
    before, rows = cache.clone(), torch.tensor([3], dtype=torch.int32)
    with own_operators.states_lie_in(own_operators.Place(cache, rows)) as _:
        place = own_operators.current_place()
        (ours,) = [one for one in LOWERINGS["kda_recurrent"] if one.provider == "ours"]
        output, _stale = ours.run(A3, *args[:5], cache[rows], scale=0.1)
    expected, last = OPERATORS["kda_recurrent"].reference(*args[:5], before[rows], scale=0.1)
    assert place.taken
    assert torch.equal(output, expected)
    assert torch.equal(cache[3:4], last)
    assert torch.equal(cache[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


def test_our_operator_leaves_a_state_of_its_own_as_it_was():
    args = operands(2, torch.float32)
    before = args[5].clone()
    (ours,) = [one for one in LOWERINGS["kda_recurrent"] if one.provider == "ours"]
    got, expected = ours.run(A3, *args), OPERATORS["kda_recurrent"].reference(*args)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert torch.equal(args[5], before)


def test_every_provider_says_where_its_signatures_were_read():
    assert all(provider.source for provider in PROVIDERS.values())
    assert {one.provider for many in LOWERINGS.values() for one in many} <= set(PROVIDERS)
    assert why_not("triton", A3) in ("is not installed", "has no GE converter; a graph for npugraph_ex can call it")
