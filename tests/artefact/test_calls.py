"""What an artefact gives is what the model gives, in place and in structure; what it was not promised is refused."""

import copy

import pytest
import torch
from toy_entries import Answer, Pages, Store, many_arguments, rich_arguments

from k31compile.errors import CallRefusedError


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def test_results_state_and_structure_are_the_models(made, rich):
    model = copy.deepcopy(made.models["rich"])
    x, store = rich_arguments()
    x2, store2 = copy.deepcopy((x, store))
    for step in range(3):
        expected, answer = model(x, store), rich(x2, store2)
        torch.testing.assert_close(answer.scores, expected.scores)
        torch.testing.assert_close(store2.layers[0].keys, store.layers[0].keys)
        torch.testing.assert_close(rich.weights["seen"], model.seen)
        assert type(answer) is Answer, step
    assert answer.store is store2
    assert answer.parts["same"] is x2
    assert answer.first.data_ptr() == store2.layers[0].keys.data_ptr()
    assert (answer.parts["none"], answer.parts["name"], answer.parts["dtype"]) == (None, "a", torch.float32)
    assert type(answer.parts["pair"]) is tuple
    torch.testing.assert_close(answer.parts["pair"][0], expected.parts["pair"][0])
    assert answer.parts["pair"][1] == 3


def test_the_compile_ran_nothing_of_the_model(made):
    x, store = rich_arguments()
    assert torch.equal(made.entries["rich"].args[0], x)
    assert torch.equal(made.entries["rich"].args[1].layers[0].keys, store.layers[0].keys)
    assert not made.entries["rich"].model.seen.any()


@pytest.mark.parametrize("length", range(1, 10))
def test_every_size_in_the_bounds_is_served(made, many, length):
    x, weights = many_arguments(length, seed=length)
    torch.testing.assert_close(many(x, weights), made.models["many"](x, weights))
    torch.testing.assert_close(many(weights=weights, x=x), made.models["many"](x, weights))


def _calls():
    x, store = rich_arguments()
    keys = store.layers[0].keys

    def caches(keys, extra=None, room=16):
        return Store([Pages(keys, extra)], room)

    yield "nothing", (x,), {}, "missing a required argument: 'store', allowed is (x, store, mask=None, *, scale=2.0"
    yield "by place", (x, store, None, 2.0), {}, "too many positional arguments"
    yield "shape", (x[:, :2].clone(), store), {}, "x has shape [2, 2, 8], allowed is [2, 3, 8]"
    yield "dimensions", (x[0], store), {}, "x has shape [3, 8], allowed is [2, 3, 8]"
    yield "dtype", (x.double(), store), {}, "x has dtype float64, allowed is float32"
    yield "device", (x.to("meta"), store), {}, "x is on meta, allowed is cpu"
    yield "strides", (x.transpose(0, 1).contiguous().transpose(0, 1), store), {}, "x has strides [8, 16, 1], allowed is"
    yield "sparse", (x.to_sparse(), store), {}, "x is sparse_coo, allowed is a strided tensor"
    yield "kind", ([1.0], store), {}, "x is a list, allowed is a tensor float32 [2, 3, 8]"
    yield "none", (x, caches(None)), {}, "store.layers[0].keys is None, allowed is a tensor float32 [2, 16, 8]"
    yield "tensor", (x, caches(keys, x)), {}, "store.layers[0].extra is a Tensor, allowed is None"
    yield "mask", (x, store, torch.ones(8, dtype=torch.bool)), {}, "mask is a Tensor, allowed is None"
    yield "number", (x, store), {"scale": 3.0}, "scale is 3.0, allowed is 2.0"
    yield "type of number", (x, store), {"scale": 2}, "scale is 2, allowed is 2.0"
    yield "text", (x, store), {"name": "b"}, "name is 'b', allowed is 'a'"
    yield "field", (x, caches(keys, room=17)), {}, "store.room is 17, allowed is 16"
    yield "length", (x, Store([*store.layers, *store.layers], 16)), {}, "store.layers has 2 items, allowed is 1"
    yield "class", (x, (store.layers, 16)), {}, "store is a tuple, allowed is a Store"
    yield "same tensor", (keys[:, :3], caches(keys)), {}, "x has strides [128, 8, 1], allowed is [24, 8, 1]"
    memory = torch.zeros(512)
    apart = memory[:256].view(2, 16, 8)
    yield "memory", (memory[200:248].view(2, 3, 8), caches(apart)), {}, "shares memory with"


@pytest.mark.parametrize(("args", "kwargs", "told"), [pytest.param(*call[1:], id=call[0]) for call in _calls()])
def test_what_was_not_promised_is_refused(rich, args, kwargs, told):
    with pytest.raises(CallRefusedError) as caught:
        rich(*args, **kwargs)
    text = str(caught.value)
    assert told in text
    assert text.startswith("K31-0303: ")
    assert "\n" not in text
    assert not rich.weights["seen"].any()


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ((10, 10), "x has size 10 in dimension 1 (T), allowed is 1 to 9"),
        ((0, 0), "x has size 0 in dimension 1 (T), allowed is 1 to 9"),
        ((5, 4), "weights has size 4 in dimension 0 (T), allowed is 5, as T is in another argument"),
    ],
)
def test_sizes_beyond_the_bounds_are_refused(many, lengths, told):
    x, weights = many_arguments(lengths[0])[0], many_arguments(lengths[1])[1]
    with pytest.raises(CallRefusedError) as caught:
        many(x, weights)
    assert told in str(caught.value)


def test_another_layout_of_a_dynamic_tensor_is_refused(many):
    x, weights = many_arguments(5)
    with pytest.raises(CallRefusedError, match=r"weights has strides \[1, 5\], allowed is \[2, 1\]"):
        many(x, weights.t().contiguous().t())


def test_a_subclass_is_refused(many):
    class Own(torch.Tensor):
        pass

    x, weights = many_arguments(5)
    with pytest.raises(CallRefusedError, match="x is a Own, allowed is a tensor float32"):
        many(x.as_subclass(Own), weights)


def _flags():
    yield "inference_mode", torch.inference_mode(), "the flag inference_mode is True, allowed is False"
    yield "autocast", torch.autocast("cpu", torch.bfloat16), "the flag autocast is bfloat16, allowed is off"
    yield "deterministic", _Setting(torch.use_deterministic_algorithms, True, False), "the flag deterministic is True"
    yield "default dtype", _Setting(torch.set_default_dtype, torch.float64, torch.float32), "default_dtype is float64"
    threads = torch.get_num_threads()
    yield "threads", _Setting(torch.set_num_threads, threads + 1, threads), f"threads is {threads + 1}, allowed is"


class _Setting:
    def __init__(self, set_it, value, before):
        self.set_it, self.value, self.before = set_it, value, before

    def __enter__(self):
        self.set_it(self.value)

    def __exit__(self, *_):
        self.set_it(self.before)


@pytest.mark.parametrize(("under", "told"), [pytest.param(*case[1:], id=case[0]) for case in _flags()])
def test_other_flags_are_refused(many, under, told):
    x, weights = many_arguments(5)
    with under, pytest.raises(CallRefusedError) as caught:
        many(x, weights)
    assert told in str(caught.value)
    many(x, weights)


def test_gradients_are_refused_only_where_something_wants_them(made, many):
    x, weights = many_arguments(5)
    with torch.enable_grad():
        torch.testing.assert_close(many(x, weights), made.models["many"](x, weights).detach())
        with pytest.raises(CallRefusedError, match="x wants gradients and gradients are on"):
            many(x.clone().requires_grad_(), weights)


def test_train_mode_is_refused(many):
    assert many.eval() is many
    assert many.training is False
    with pytest.raises(CallRefusedError, match="the model was compiled in eval mode, train mode is another graph"):
        many.train()


def test_entries_and_reports_are_told(many):
    assert many.entries == ["many", "many[T=1]"]
    assert many.report("many")["graphs"]
    assert "seconds" not in str(many.report("many"))
    with pytest.raises(CallRefusedError, match="there is no entry 'few'; entries: many, many"):
        many.report("few")


def test_a_transform_is_refused(many):
    x, weights = many_arguments(5)
    with pytest.raises(CallRefusedError, match=r"the call is inside of a transform of torch\.func"):
        torch.func.vmap(lambda one: many(one, weights))(torch.stack([x, x]))
