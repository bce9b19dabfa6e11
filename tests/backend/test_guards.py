"""guards="modules" and "none": what is dropped, what is never dropped, and models that they are not for."""

import pytest
import torch
from torch import nn

import k31compile
from k31compile.errors import OptionError
from k31compile.guard_filters import both, guard_filter

FACTOR = 2.0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.power = nn.LayerNorm(16), nn.Linear(16, 16), 2
        self.register_buffer("table", torch.arange(16.0))

    def forward(self, x, cache, start):
        cache[:, start] = x
        return x + self.up(self.norm(x)) * self.power * FACTOR + cache.sum(1) + self.table


class Stack(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x, caches, start):
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, start)
        return x


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(batch=2, width=4):
    return torch.randn(batch, 16), [torch.zeros(batch, width, 16) for _ in range(3)]


def counted(model, **options):
    kept: list[str] = []

    def note(entries):
        kept.extend(entry.name for entry in entries)
        return [True] * len(entries)

    guards = options.pop("guards")
    first = guard_filter(guards)

    def seen(entries):
        answers = [True] * len(entries) if first is None else first(entries)
        note([entry for entry, answer in zip(entries, answers, strict=True) if answer])
        return answers

    return k31compile.compile(model, codegen="ops", guards=guards, guard_filter_fn=seen), kept


@torch.no_grad()
@pytest.mark.parametrize("guards", ["safe", "modules", "none"])
def test_calls_of_every_shape_are_right(guards):
    """Batch, width and position change from call to call, back and forth."""
    model = Stack().eval()
    call = k31compile.compile(model, codegen="ops", guards=guards)
    for batch, width, start in [(2, 4, 1), (3, 4, 1), (2, 5, 0), (2, 4, 3), (2, 4, 1), (1, 4, 2)]:
        x, caches = arguments(batch, width)
        others = [cache.clone() for cache in caches]
        torch.testing.assert_close(call(x, caches, start), model(x, others, start))
        assert all(torch.equal(one, other) for one, other in zip(caches, others, strict=True))


@torch.no_grad()
def test_fewer_guards_are_kept_from_word_to_word():
    kept = {}
    for guards in ("safe", "modules", "none"):
        torch._dynamo.reset()
        call, kept[guards] = counted(Stack().eval(), guards=guards)
        call(*arguments(), 1)
    assert len(kept["none"]) < len(kept["modules"]) < len(kept["safe"]) / 3
    for guards in ("modules", "none"):
        asked = [name for name in kept[guards] if name.startswith("self._modules")]
        assert asked, "the shapes of buffers are asked for"
        assert all("table" in name for name in asked)
        assert {"x", "start"} <= set(kept[guards])
    assert any("FACTOR" in name for name in kept["modules"])
    assert not any("FACTOR" in name for name in kept["none"])


@torch.no_grad()
def test_values_of_weights_are_read_at_each_call():
    model = Stack().eval()
    call = k31compile.compile(model, codegen="ops", guards="none")
    x, caches = arguments()
    call(x, caches, 1)
    model.load_state_dict(Stack().state_dict())
    torch.testing.assert_close(call(x, caches, 1), model(x, caches, 1))
    model.layers[0].up.weight = nn.Parameter(torch.randn(16, 16))
    torch.testing.assert_close(call(x, caches, 1), model(x, caches, 1))


@torch.no_grad()
@pytest.mark.parametrize("guards", ["safe", "modules", "none"])
def test_grad_mode_and_a_buffer_of_another_length_are_noticed(guards):
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.ones(3, 4))

        def forward(self, x):
            return x * self.cache.sum(0)

    model = Held()
    call = k31compile.compile(model, codegen="ops", guards=guards)
    x = torch.randn(2, 4)
    for rows in (3, 7, 1):
        model.cache = torch.full((rows, 4), 2.0)
        torch.testing.assert_close(call(x), model(x))
    with torch.enable_grad():
        y = x.clone().requires_grad_()
        call(y).sum().backward()
        assert y.grad is not None


class Counts(nn.Module):
    """Keeps its position itself, as transformers' older caches do."""

    def __init__(self):
        super().__init__()
        self.seen, self.cache, self.past = 0, None, []

    def forward(self, x):
        self.seen += x.shape[0]
        return x * self.seen


class Grows(Counts):
    def forward(self, x):
        self.cache = x if self.cache is None else torch.cat([self.cache, x])
        return self.cache.sum(0)


class Appends(Counts):
    def forward(self, x):
        self.past.append(x)
        return sum(self.past)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "name"), [(Counts, "seen"), (Grows, "cache"), (Appends, "past")])
@pytest.mark.parametrize("guards", ["modules", "none"])
def test_a_model_with_a_state_of_its_own_is_refused(kind, name, guards):
    call = k31compile.compile(kind(), codegen="ops", guards=guards)
    with pytest.raises(OptionError, match=f"guards='{guards}' is not for this model: its forward changes {name}"):
        call(torch.ones(2, 3))


@torch.no_grad()
def test_a_model_with_a_state_of_its_own_is_right_with_all_guards():
    plain, model = Counts(), Counts()
    call = k31compile.compile(model, codegen="ops")
    for _ in range(4):
        assert torch.equal(call(torch.ones(2, 3)), plain(torch.ones(2, 3)))


@torch.no_grad()
def test_torch_compile_refuses_them_with_the_remedy():
    call = torch.compile(Stack(), backend="k31", options={"codegen": "ops", "guards": "none"})
    with pytest.raises(Exception, match=r"use k31compile\.compile\(model, guards='none'\)"):
        call(*arguments(), 1)


def test_two_filters_keep_what_both_keep():
    def even(entries):
        return [entry % 2 == 0 for entry in entries]

    def third(entries):
        return [entry % 3 == 0 for entry in entries]

    assert both(even, third)(range(7)) == [True, False, False, False, False, False, True]
    assert both(even, None) is even
    assert both(None, None) is None
