"""What cannot be an artefact is refused while it is made, with the place and a remedy, and nothing is left behind."""

import pytest
import torch
from torch import nn

from k31compile.ahead import Progress, make_artefact
from k31compile.ahead.variants import variants
from k31compile.entry import Entry
from k31compile.errors import ArtefactError, K31Error, TraceError

X = torch.ones(3, 4)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return x + self.steps


class Holder:
    def __init__(self):
        self.values = []
        self.length = 0


def _appends(x, holder):
    holder.values.append(x + 1)
    return x * 2


def _counts(x, holder):
    holder.length += 1
    return x * 2


def _fills(x, table):
    table["new"] = x + 1
    return x * 2


def _gives_a_size(x):
    return x + 1, x.shape[0]


def _breaks(x):
    return x + len(open("/nowhere").read())


def _is_nothing(x):
    return x


class Opaque:
    __slots__ = ()


def _takes(x, other):
    return x + 1


def _cases():
    yield "attribute", Entry("e", Counts().eval(), (X,)), "the call changes L['self'] (steps)"
    yield "list", Entry("e", _appends, (X, Holder())), "the call changes"
    yield "field", Entry("e", _counts, (X, Holder())), "the call changes L['holder'] (length)"
    yield "dict", Entry("e", _fills, (X, {})), "the call changes"
    yield "size", Entry("e", _gives_a_size, (X,), dynamic={"0": {0: ("N", 2, 9)}}), "SymInt, no tensor"
    yield "break", Entry("e", _breaks, (X,)), "not one graph"
    yield "empty", Entry("e", _is_nothing, (X,)), "its graph is no library: the graph computes nothing"
    yield "module", Entry("e", _takes, (X, nn.Linear(2, 2))), "other is a Linear, allowed is tensors, plain values"
    yield "object", Entry("e", _takes, (X, Opaque())), "other is a Opaque, allowed is"
    yield "meta", Entry("e", _takes, (X.to("meta"), 1)), "x is on meta, allowed is the CPU"
    yield "gradients", Entry("e", nn.Linear(4, 4).eval(), (X,), mode="grad"), "wants gradients"


@pytest.mark.parametrize(("entry", "told"), [pytest.param(*case[1:], id=case[0]) for case in _cases()])
def test_what_an_artefact_would_lose_is_refused(own_cache, tmp_path, entry, told):
    with pytest.raises(K31Error) as caught:
        make_artefact([entry], tmp_path / "f.k31")
    assert told in str(caught.value)
    assert isinstance(caught.value, ArtefactError | TraceError)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(X, torch.ones(3, 4))


def test_lists_that_do_not_fit_together_are_refused(own_cache, tmp_path):
    one = Entry("one", nn.Linear(4, 4).eval(), (X,))
    with pytest.raises(ArtefactError, match="two entries are called 'one'"):
        make_artefact([one, one], tmp_path / "f.k31")
    with pytest.raises(ArtefactError, match="some models are in train mode and some in eval mode"):
        make_artefact([one, Entry("two", nn.Linear(4, 4).train(), (X,))], tmp_path / "f.k31")
    bounds = {"a": 9, "b": 8}
    dynamic = [Entry(name, _gives_a_size, (X,), dynamic={"0": {0: ("N", 2, high)}}) for name, high in bounds.items()]
    with pytest.raises(ArtefactError, match="the size N has other bounds in two entries"):
        make_artefact(dynamic, tmp_path / "f.k31")


def test_an_entry_is_compiled_apart_for_sizes_0_and_1():
    entry = Entry("e", _takes, (torch.arange(20.0).view(4, 5).t(), 1), dynamic={"0": {0: ("N", 0, 9), 1: ("M", 4, 4)}})
    made = {each.name: each for each in variants(entry)}
    assert list(made) == ["e", "e[N=0]", "e[N=1]"]
    assert made["e"].dynamic == {"0": {0: ("N", 2, 9)}}
    assert [tuple(each.args[0].shape) for each in made.values()] == [(5, 4), (0, 4), (1, 4)]
    assert made["e[N=1]"].args[0].stride() == (1, 1)
    assert torch.equal(made["e[N=1]"].args[0], entry.args[0][:1])
    assert made["e[N=1]"].dynamic == {}


def test_an_example_of_size_1_is_traced_with_more():
    entry = Entry("e", _takes, (torch.ones(1, 4), 1), dynamic={"0": {0: ("N", 1, 5)}})
    made = {each.name: each for each in variants(entry)}
    assert made["e"].args[0].shape == (5, 4)
    assert made["e[N=1]"].args[0].shape == (1, 4)


def test_progress_names_each_compile_and_its_phases(own_cache, tmp_path):
    begun, said = [], []
    progress = Progress(lambda name, reason: begun.append((name, reason)), said.append)
    entry = Entry("line", nn.Linear(4, 4).eval(), (X,))
    told = make_artefact([entry], tmp_path / "f.k31", progress=progress)
    assert begun == [("line", "entry 1 of 1, ahead of time")]
    assert said == ["trace", "build the library", "weights", "write"]
    assert set(progress.seconds) == {"trace", "passes", "build", "weights", "write"}
    assert told["weights"] == [{"file": str(tmp_path / "f.safetensors"), "tensors": 2}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.k31", "f.safetensors"]


def test_weights_are_taken_by_reference_where_they_are_the_same(own_cache, tmp_path):
    from safetensors.torch import save_file

    from k31compile import load

    model = nn.Linear(4, 4).eval()
    model.register_buffer("offset", torch.ones(4))
    file = tmp_path / "checkpoint.safetensors"
    save_file({"weight": model.weight.detach(), "bias": model.bias.detach()}, file)
    told = make_artefact([Entry("line", model, (X,))], tmp_path / "f.k31", weights=file)
    assert told["weights"] == [{"file": str(file), "tensors": 2}]
    assert not (tmp_path / "f.safetensors").exists()
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "f.k31")(X), model(X))
    save_file({"weight": model.weight.detach() + 1, "bias": model.bias.detach()}, file)
    with pytest.raises(ArtefactError, match="weight there is not the weight of the model"):
        make_artefact([Entry("line", model, (X,))], tmp_path / "g.k31", weights=file)
    assert not (tmp_path / "g.k31").exists()
