"""What target cpu gives to call: the graph itself with codegen "ops", Inductor's code around it otherwise."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import k31compile


class Counter(TorchDispatchMode):
    """The operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def step(cache, x, rows):
    cache[rows] = x
    return cache[0] + cache.sum(0)


def arguments():
    return torch.zeros(5, 4), torch.ones(2, 4), torch.tensor([0, 3])


def compiled(codegen):
    torch._dynamo.reset()
    return torch.compile(step, backend="k31", options={"codegen": codegen})


def test_a_step_writes_the_callers_cache_without_copying_it():
    fn, (cache, x, rows) = compiled("ops"), arguments()
    memory = cache.data_ptr()
    with torch.no_grad():
        fn(*arguments())
        with Counter() as counter:
            got = fn(cache, x, rows)
    expected = torch.zeros(5, 4)
    assert torch.equal(got, step(expected, x, rows))
    assert torch.equal(cache, expected)
    assert cache.data_ptr() == memory
    assert "aten.index_put_.default" in counter.names
    assert not {"aten.copy_.default", "aten.index_put.default", "aten.clone.default"} & set(counter.names)


@pytest.mark.slow
def test_inductor_gives_the_same():
    fn, (cache, x, rows) = compiled("inductor"), arguments()
    with torch.no_grad():
        got = fn(cache, x, rows)
    expected = torch.zeros(5, 4)
    torch.testing.assert_close(got, step(expected, x, rows))
    assert torch.equal(cache, expected)


def test_each_fused_operator_has_a_provider_and_a_reason():
    from k31compile.targets.cpu import providers

    found = providers(["lightning_indexer", "static_top_k", "sparse_flash_attention"])
    assert set(found) == {"lightning_indexer", "sparse_flash_attention"}
    assert all(choice["provider"] and choice["why"] for choice in found.values())


def test_the_report_of_a_step_names_no_fallback():
    with torch.no_grad():
        compiled("ops")(*arguments())
    assert k31compile.last_report().notes == []


def test_a_fused_reader_behind_a_write_still_reads_the_old_cache():
    """The scores are taken before the write, the best of them after it: the operator stands after it."""

    def program(q, cache, w, x):
        scores = (w.unsqueeze(-1) * torch.einsum("bthd,bsd->bths", q, cache).relu()).sum(2)
        cache[:, 3] = x
        return scores.topk(4, dim=-1).indices

    generator = torch.Generator().manual_seed(0)
    q, cache, w = (torch.randn(shape, generator=generator) for shape in ((2, 5, 3, 8), (2, 13, 8), (2, 5, 3)))
    w, x = w.abs(), torch.full((8,), 9.0)
    ours, theirs = cache.clone(), cache.clone()
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(program, backend="k31", options={"codegen": "ops"})(q, ours, w, x)
    assert k31compile.last_report().fused == {"lightning_indexer": 1}
    assert torch.equal(got.sort(-1).values, program(q, theirs, w, x).sort(-1).values)
    assert torch.equal(ours, theirs)
