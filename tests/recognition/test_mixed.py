"""KDA layers in mixed company: two styles, two constants, shared values, graph breaks, modes, dynamic sizes, export."""

import pytest
import torch
import torch.nn.functional as F
from layers import seeded
from running import compiled, relative_error, run
from torch import nn

import k31compile

B, T, HIDDEN, H, K, V, TAPS = 2, 5, 26, 3, 6, 7, 4
BOUND = 2e-5
A_LAYER = {"short_conv": 1, "kda_recurrent": 1, "gated_rms_norm": 1}


class Einsum(nn.Module):
    """Rows [B, T, H, K], state [K, V], einsum; one convolution for q, k and v; silu behind it."""

    eps = 1e-5

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, H * (2 * K + V), bias=False)
        self.taps = nn.Parameter(torch.randn(H * (2 * K + V), 1, TAPS))
        self.gate = nn.Linear(HIDDEN, H * K)
        self.beta = nn.Linear(HIDDEN, H)
        self.opening = nn.Linear(HIDDEN, H * V)
        self.weight = nn.Parameter(torch.rand(V) + 0.5)
        self.out = nn.Linear(H * V, HIDDEN, bias=False)

    def rows(self, x):
        b, t, _ = x.shape
        mixed = F.conv1d(F.pad(self.qkv(x).transpose(1, 2), (TAPS - 1, 0)), self.taps, groups=self.taps.shape[0])
        q, k, v = F.silu(mixed).transpose(1, 2).view(b, t, H, 2 * K + V).split([K, K, V], dim=-1)
        gate = -F.softplus(self.gate(x)).view(b, t, H, K)
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, gate, self.beta(x).sigmoid()

    def norm(self, o, x):
        opening = self.opening(x).view(o.shape)
        return self.weight * o * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.eps) * opening.sigmoid()

    def recur(self, q, k, v, gate, beta):
        state, rows = q.new_zeros(q.shape[0], H, K, V), []
        for t in range(q.shape[1]):
            state = state * gate[:, t].exp().unsqueeze(-1)
            delta = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t].unsqueeze(-1)
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
            rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] * K**-0.5))
        return torch.stack(rows, 1)

    def forward(self, x):
        q, k, v, gate, beta = self.rows(x)
        return x + self.out(self.norm(self.recur(q, k, v, gate, beta), x).flatten(2))


class Matmul(Einsum):
    """State [V, K], matmul, decays in powers of two, beta on the key, another eps."""

    eps = 1e-3

    def recur(self, q, k, v, gate, beta):
        state, rows = q.new_zeros(q.shape[0], H, V, K), []
        decays = torch.exp2(gate * 1.4426950408889634)
        for t in range(q.shape[1]):
            state = state * decays[:, t].unsqueeze(-2)
            delta = v[:, t] - (state @ k[:, t].unsqueeze(-1)).squeeze(-1)
            state = state + delta.unsqueeze(-1) @ (k[:, t] * beta[:, t].unsqueeze(-1)).unsqueeze(-2)
            rows.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1) / K**0.5)
        return torch.stack(rows, 1)


class Broken(Einsum):
    """A graph break between the convolution and the recurrence."""

    def forward(self, x):
        q, k, v, gate, beta = self.rows(x)
        torch._dynamo.graph_break()
        return x + self.out(self.norm(self.recur(q, k, v, gate, beta), x).flatten(2))


def made(*kinds):
    return seeded(lambda: nn.Sequential(*(kind() for kind in kinds)))


def rows(batch=B, length=T):
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(1))


def counted(done):
    return {name: count for name, count in total(*done.reports).items() if count}


def total(*reports):
    """What is fused and what fused operators took in."""
    told = k31compile.Report.merge(reports).to_dict()
    inside = told.get("contains", {})
    return {name: told["fused"].get(name, 0) + inside.get(name, 0) for name in A_LAYER}


def times(count):
    return {name: count * number for name, number in A_LAYER.items()}


def test_two_styles_and_two_constants_in_one_model():
    done = run(made(Einsum, Matmul, Einsum), rows(), stable=False)
    assert counted(done) == times(3)
    assert relative_error(done.got, done.want) < BOUND
    assert not done.refused


def test_one_gate_and_one_norm_shared_by_two_recurrences():
    """The normed keys and the gate are read by both: neither region may take them away from the other."""
    first, second = made(Einsum, Matmul)

    def shared(x):
        q, k, v, gate, beta = first.rows(x)
        return first.recur(q, k, v, gate, beta) + second.recur(k, q, v, gate, beta)

    done = run(shared, rows(), stable=False)
    assert total(*done.reports)["kda_recurrent"] == 2
    assert relative_error(done.got, done.want) < BOUND


def test_an_inner_value_that_somebody_reads_is_said():
    layer = made(Einsum)[0]

    def keeps_the_first_state(x):
        q, k, v, gate, beta = layer.rows(x)
        state, outputs, kept = q.new_zeros(B, H, K, V), [], None
        for t in range(T):
            state = state * gate[:, t].exp().unsqueeze(-1)
            delta = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t].unsqueeze(-1)
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
            kept = state if t == 1 else kept
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        return torch.stack(outputs, 1), kept

    done = run(keeps_the_first_state, rows(), stable=False)
    assert total(*done.reports)["kda_recurrent"] == 0
    assert any("between two tokens" in str(r) or "also read" in str(r) for r in done.refused), done.reasons
    for got, want in zip(done.got, done.want, strict=True):
        assert relative_error(got, want) < BOUND


def test_a_graph_break_costs_nothing_but_the_break():
    done = run(made(Broken), rows(), stable=False)
    assert len(done.reports) == 2
    assert counted(done) == A_LAYER
    assert relative_error(done.got, done.want) < BOUND


def test_a_marked_batch_stays_one_graph():
    model = made(Einsum)
    fn, known = compiled(model, dynamic=None), len(k31compile.reports())
    with torch.no_grad():
        for batch in (2, 3, 6):
            x = rows(batch)
            torch._dynamo.mark_dynamic(x, 0)
            assert relative_error(fn(x), model(x)) < BOUND
    (report,) = k31compile.reports()[known:]
    assert total(report)["kda_recurrent"] == 1


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])
def test_without_gradients(context):
    model = made(Einsum)
    with context():
        want = model(rows())
        got = compiled(model)(rows())
    assert relative_error(got, want) < BOUND
    assert total(k31compile.last_report())["kda_recurrent"] == 1


def test_under_autocast_the_author_s_types_stay():
    model = made(Einsum)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want = model(rows())
        got = compiled(model)(rows())
    exact = model(rows())
    assert got.dtype == want.dtype
    assert relative_error(got, exact) <= 1.25 * relative_error(want, exact)
    assert (
        k31compile.last_report().fused.get("kda_recurrent", 0)
        + k31compile.last_report().to_dict().get("contains", {}).get("kda_recurrent", 0)
        == 1
    )


def test_an_exported_program_is_compiled_like_its_model():
    model = made(Einsum, Matmul)
    exported = torch.export.export(model, (rows(),)).module()
    done = run(exported, rows(), stable=False)
    assert counted(done) == times(2)
    assert relative_error(done.got, done.want) < BOUND


def test_a_model_in_training_is_handed_over_with_a_note():
    model = made(Einsum).requires_grad_(True).train()
    x = rows().requires_grad_(True)
    torch._dynamo.reset()
    got = compiled(model)(x)
    got.sum().backward()
    assert x.grad is not None
    report = k31compile.last_report()
    assert not report.fused
    assert any("for inference" in note and "no_grad" in note for note in report.notes)


@pytest.mark.parametrize("codegen", ["ops", "inductor"])
def test_a_graph_that_enters_autocast_is_handed_over(codegen):
    """Its casts back to float32 would be lost: in the trace nothing is in bfloat16 there."""
    weight, x = torch.randn(16, 16), torch.randn(4, 16)

    def program(x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, weight).float() * (1 + 2**-12)

    with torch.no_grad():
        want = program(x)
        got = torch.compile(program, backend="k31", options={"codegen": codegen})(x)
    assert got.dtype == want.dtype == torch.float32
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert any("enters autocast itself" in note for note in k31compile.last_report().notes)
