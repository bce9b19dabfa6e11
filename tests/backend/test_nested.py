"""`k31compile.compile`: equal layers are traced once, each keeps its own weights, and the classes stay as they were."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import k31compile
from k31compile.errors import TraceError
from k31compile.report import last_report

WIDTH, HEADS, INDEX, LATENT, KEYS, TOPK = 32, 3, 10, 14, 24, 5


class Layer(nn.Module):
    """An indexer and an absorbed attention over caches that the layer writes in place."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.wq = nn.Linear(WIDTH, HEADS * INDEX, bias=False)
        self.wk = nn.Linear(WIDTH, INDEX, bias=False)
        self.ww = nn.Linear(WIDTH, HEADS, bias=False)
        self.q = nn.Linear(WIDTH, HEADS * LATENT, bias=False)
        self.c = nn.Linear(WIDTH, LATENT, bias=False)
        self.o = nn.Linear(HEADS * LATENT, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, latents: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        place = start + torch.arange(t)
        keys.index_copy_(1, place, self.wk(x))
        latents.index_copy_(1, place, self.c(x))
        dots = torch.einsum("bthd,bsd->bths", self.wq(x).view(b, t, HEADS, INDEX), keys).relu()
        seen = torch.arange(KEYS) <= place[:, None]
        scores = (dots * self.ww(x)[..., None]).sum(2).masked_fill(~seen, float("-inf"))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(TOPK, -1).indices, True) & seen
        logits = torch.einsum("bthl,bsl->bhts", self.q(x).view(b, t, HEADS, LATENT), latents) * 0.3
        weights = logits.masked_fill(~chosen[:, None], float("-inf")).softmax(-1)
        return x + self.o(torch.einsum("bhts,bsl->bthl", weights, latents).reshape(b, t, -1))


class Model(nn.Module):
    """`pooled` layers read pool[self.index], as a model with one list of caches does."""

    def __init__(self, layers: int, pooled: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pooled(i) if pooled else Layer(i) for i in range(layers))
        self.head = nn.Linear(WIDTH, 7)
        self.pooled = pooled

    def forward(self, x: torch.Tensor, pool: list[Any], start: torch.Tensor) -> torch.Tensor:
        for layer, caches in zip(self.layers, pool, strict=True):
            x = layer(x, pool, start) if self.pooled else layer(x, *caches, start)
        return self.head(x)


class Pooled(Layer):
    def forward(self, x: torch.Tensor, pool: list[Any], start: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, *pool[self.index], start)


def pool_of(layers: int) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(2, KEYS, INDEX, generator=generator), torch.randn(2, KEYS, LATENT, generator=generator))
        for _ in range(layers)
    ]


@pytest.mark.parametrize(("layers", "pooled"), [(3, False), (9, False), (9, True)])
def test_every_layer_keeps_its_weights(layers: int, pooled: bool, eager: Any) -> None:
    torch.manual_seed(1)
    model = Model(layers, pooled).eval()
    forward = Layer.forward
    compiled = k31compile.compile(model, codegen="ops")
    theirs, ours = pool_of(layers), pool_of(layers)
    for start, length in ((3, 6), (9, 6)):
        x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(start))
        with torch.no_grad():
            with eager():
                expected = model(x, theirs, torch.tensor(start))
            got = compiled(x, ours, torch.tensor(start))
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    for layer, other in zip(theirs, ours, strict=True):
        for cache, same in zip(layer, other, strict=True):
            assert (cache - same).abs().max() <= 1e-5 * cache.abs().max()
    each = ("indexer_prolog", "lightning_indexer", "mla_prolog", "sparse_flash_attention", "static_top_k")
    assert last_report().fused == dict.fromkeys(each, layers)
    assert sum(region["calls"] for region in last_report().regions) == 2 * layers
    assert Layer.forward is forward


def test_one_body_for_equal_layers() -> None:
    model = Model(9, pooled=False).eval()
    with torch.no_grad():
        k31compile.compile(model, codegen="ops")(torch.randn(2, 4, WIDTH), pool_of(9), torch.tensor(2))
    assert any("9 layers are calls of 1 nested regions" in note for note in last_report().notes)
    assert len(last_report().confirmations) == 2


def test_two_models_in_one_process(eager: Any) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Model(3, pooled=False).eval()
        x = torch.randn(2, 5, WIDTH)
        with torch.no_grad():
            with eager():
                expected = model(x, pool_of(3), torch.tensor(4))
            for compiled in (
                k31compile.compile(model, codegen="ops"),
                torch.compile(model, backend="k31", options={"codegen": "ops"}),
            ):
                got = compiled(x, pool_of(3), torch.tensor(4))
                assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


class Stack(nn.Module):
    """Layers of one kind behind one of another, which Dynamo inlines; a view of what they write may be handed on."""

    def __init__(self, hands_on: bool) -> None:
        super().__init__()
        self.first = nn.ModuleList(Layer(0) for _ in range(1))
        self.layers = nn.ModuleList(Layer(i) for i in range(3))
        self.hands_on = hands_on

    def forward(self, x: torch.Tensor, pool: list[Any], start: torch.Tensor) -> Any:
        keys, latents = pool[0]
        x = self.first[0](x + 1 - 1, *pool[3], start) * 2
        handed = keys.view(2 * KEYS, INDEX) if self.hands_on else x
        x = x * 0.5 + handed.mean()
        for layer in self.layers:
            x = layer(x, keys, latents, start)
        return x, handed


@pytest.mark.parametrize("hands_on", [False, True])
def test_what_stands_before_the_regions(hands_on: bool, eager: Any) -> None:
    torch.manual_seed(3)
    model = Stack(hands_on).eval()
    model.first[0].forward = functools.partial(Layer.forward, model.first[0])  # of another kind for Dynamo: inlined
    x, start = torch.randn(2, 4, WIDTH), torch.tensor(6)
    theirs, ours = pool_of(4), pool_of(4)
    with torch.no_grad():
        with eager():
            expected = model(x, theirs, start)
        got = k31compile.compile(model, codegen="ops")(x, ours, start)
    for mine, other in zip(got, expected, strict=True):
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max()
    for cache, same in zip(torch.utils._pytree.tree_leaves(theirs), torch.utils._pytree.tree_leaves(ours), strict=True):
        assert (cache - same).abs().max() <= 1e-5 * cache.abs().max()
    counts = last_report().fused
    assert counts["lightning_indexer"] == counts["sparse_flash_attention"] == (3 if hands_on else 4)


class GivenBack(Layer):
    """A layer that returns what it was given, as attention residuals do with their bank."""

    def forward(self, x: torch.Tensor, given: torch.Tensor, *rest: Any) -> Any:  # type: ignore[override]
        return super().forward(x, *rest), given


class Banked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GivenBack(i) for i in range(2))

    def forward(self, x: torch.Tensor, pool: list[Any], start: torch.Tensor) -> torch.Tensor:
        given = x
        for layer, caches in zip(self.layers, pool, strict=True):
            x, given = layer(x, given, *caches, start)
        return x + given


def test_layers_that_give_back_their_input_are_compiled_one_by_one(eager: Any) -> None:
    torch.manual_seed(4)
    model = Banked().eval()
    x, start = torch.randn(2, 4, WIDTH), torch.tensor(6)
    with torch.no_grad():
        with eager():
            expected = model(x, pool_of(2), start)
        got = k31compile.compile(model, codegen="ops")(x, pool_of(2), start)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert last_report().fused["lightning_indexer"] == 2
    assert any("GivenBack: each layer was traced and compiled anew" in note for note in last_report().notes)


class Plain(nn.Module):
    """A layer that returns one new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


def eight(x: torch.Tensor) -> torch.Tensor:
    """A stretch that is long enough to be rewritten."""
    for _ in range(4):
        x = (x * 1.01).sin() + 0.1
    return x


class Around(nn.Module):
    """Three equal layers, and something before and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Plain() for _ in range(3))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ReadLater(Around):
    """What the first stretch makes is read by the last one."""

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        early = eight(x)
        return eight(self.through(x)) + early


class ViewBefore(Around):
    """A view of the cache is taken before the layers, the cache is written behind them, the view is read."""

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        top = cache[:, :4]
        x = self.through(x)
        cache[:, :4] = x
        return eight(x) + top


class WrittenView(Around):
    """The view is written, the cache is read."""

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        top = cache[:, :4]
        x = self.through(x)
        top.copy_(x)
        return eight(x) + cache.sum()


@pytest.mark.parametrize("kind", [ReadLater, ViewBefore, WrittenView])
def test_memory_between_regions(kind: type[nn.Module], eager: Any) -> None:
    torch.manual_seed(6)
    model = kind().eval()
    compiled = k31compile.compile(model, codegen="ops")
    theirs = torch.randn(2, 6, WIDTH)
    ours = theirs.clone()
    for seed in (1, 2):
        x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            with eager():
                expected = model(x, theirs)
            got = compiled(x, ours)
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
def test_what_stands_between_regions_is_built_by_inductor() -> None:
    class Behind(Around):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return eight(self.through(x))

    torch.manual_seed(6)
    model = Behind().eval()
    x = torch.randn(2, 4, WIDTH)
    with torch.no_grad():
        expected = model(x)
        got = k31compile.compile(model, cache=False)(x)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert any("nested regions" in note for note in last_report().notes)


def test_inputs_that_share_memory_are_not_taken_for_separate(eager: Any) -> None:
    class Two(Around):
        def forward(self, x: torch.Tensor, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            x = self.through(x)
            whole.mul_(2.0)
            return eight(x) + part

    model = Two().eval()
    x, whole = torch.randn(2, 4, WIDTH), torch.randn(2, 6, WIDTH)
    other = whole.clone()
    with torch.no_grad():
        with eager():
            expected = model(x, whole, whole[:, :4])
        got = k31compile.compile(model, codegen="ops")(x, other, other[:, :4])
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_ran_before_a_graph_break_is_not_run_twice() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Returning() for _ in range(2))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            torch._dynamo.graph_break()
            given = x
            for layer in self.layers:
                x, given = layer(x, given)
            return x + given

    class Returning(Plain):
        def forward(self, x: torch.Tensor, given: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), given

    model = Counting().eval()
    compiled = k31compile.compile(model, codegen="ops")
    with torch.no_grad():
        with pytest.raises(TraceError, match="what ran before the layers has run"):
            compiled(torch.randn(2, 4, WIDTH))
        assert model.count == 1
        compiled(torch.randn(2, 4, WIDTH))
        assert model.count == 2


class Derived(Plain):
    """A layer of another class, whose forward calls that of its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


def test_a_derived_layer_beside_its_base(eager: Any) -> None:
    class Mixed(Around):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Plain(), Derived(), Plain(), Derived()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.through(x)

    model = Mixed().eval()
    x = torch.randn(2, 4, WIDTH)
    with torch.no_grad():
        with eager():
            expected = model(x)
        got = k31compile.compile(model, codegen="ops")(x)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
