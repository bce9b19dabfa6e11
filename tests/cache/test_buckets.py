"""Rows G1 and G4: every size up to the maximum is served by a compiled graph, padded and cut exactly; none is eager."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from k31compile.buckets import Bucketed, bucket_sizes, combinations, resize_entry
from k31compile.entry import Entry
from k31compile.errors import BucketError, ColdCompileError
from k31compile.model import Caches, K31Config, K31ForCausalLM

QUICK = {"codegen": "ops", "cache": False}


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ((13, 8), (8, 13)),
        ({"max": 13, "stride": 8}, (8, 13)),
        ((16, 8), (8, 16)),
        ((5, 8), (5,)),
        ((1, 1), (1,)),
        ([8, 13], (8, 13)),
        ([13, 1, 4, 4], (1, 4, 13)),
    ],
)
def test_the_maximum_is_always_a_bucket(spec: Any, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(spec) == sizes


@pytest.mark.parametrize(
    "spec",
    [[], [0], [1.5], [True], (13,), (13, 0), (0, 8), ("13", 8), {"max": 13}, {"max": 13, "stride": 8, "x": 1}, 13],
)
def test_what_is_no_list_of_sizes_is_refused(spec: Any) -> None:
    with pytest.raises(BucketError, match=r"K31-0210: .*'batch'.*; (write|give) "):
        bucket_sizes(spec, "batch")


def test_sizes_of_several_names_are_combined() -> None:
    found = combinations({"batch": (13, 8), "length": [4]})
    assert found == [{"batch": 8, "length": 4}, {"batch": 13, "length": 4}]


class Rows(NamedTuple):
    values: Tensor
    masks: dict[str, Tensor]


class Toy(nn.Module):
    """Rows of tokens, mixed along the length as a mask says; counts the tokens of each row in a state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, rows: Rows, place: Tensor, state: Tensor) -> dict[str, Tensor]:
        valid = rows.masks["valid"]
        state.index_add_(0, place, valid.sum(1, keepdim=True).to(state.dtype).expand(-1, 2))
        mixed = (rows.values * valid.unsqueeze(-1)).cumsum(1)
        return {"out": self.second(self.first(mixed).relu()), "count": valid.sum(1)}


def arguments(batch: int, length: int) -> tuple[Rows, Tensor, Tensor]:
    drawn = torch.randn(batch, length, 6, generator=torch.Generator().manual_seed(batch * 31 + length))
    valid = torch.ones(batch, length, dtype=torch.bool)
    return Rows(drawn, {"valid": valid}), torch.arange(1, batch + 1), torch.zeros(21, 2)


BATCH, LENGTH = ("batch", 1, 20), ("length", 1, 16)
DYNAMIC = {"0.values": {0: BATCH, 1: LENGTH}, "0.masks.valid": {0: BATCH, 1: LENGTH}, "1": {0: BATCH}}
FILL = {"0.values": float("nan"), "0.masks.valid": False, "1": 0}
OUTPUTS = {"out": {0: "batch", 1: "length"}, "count": {0: "batch"}}


def bucketed(batch: Any, length: Any, model: nn.Module | None = None, **more: Any) -> Bucketed:
    entry = Entry("toy", (model or Toy()).eval(), arguments(2, 3), dynamic=DYNAMIC)
    given = {"fill": {**FILL, "0.values": 0.0}, "outputs": OUTPUTS, "options": QUICK, **more}
    return Bucketed(entry, {"batch": batch, "length": length}, **given)


def assert_like_eager(model: nn.Module, compiled: Bucketed, batch: int, length: int) -> None:
    rows, place, state = arguments(batch, length)
    _, _, expected_state = arguments(batch, length)
    with torch.no_grad():
        expected = model(rows, place, expected_state)
    got = compiled(rows, place, state)
    assert list(got) == ["out", "count"]
    for name in got:
        assert got[name].shape == expected[name].shape
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)
    assert torch.equal(state, expected_state), "row 0 is nobody's: padding adds 0 there"


def test_twenty_batches_by_five_lengths_are_all_served_by_their_buckets() -> None:
    model = Toy().eval()
    compiled = bucketed((20, 6), [1, 3, 5, 9, 16], model)
    counters.clear()
    sizes = list(itertools.product(range(1, 21), (1, 3, 5, 9, 16)))
    for batch, length in sizes:
        assert_like_eager(model, compiled, batch, length)
    assert compiled.calls == len(sizes) == 100
    assert compiled.compiles == 4 * 5, "one graph for each bucket, and no more"
    assert compiled.eager == 0
    assert counters["stats"]["unique_graphs"] == 4 * 5
    assert not counters["graph_break"]
    served = [tuple(each) for bucket in compiled.to_dict()["buckets"] for each in bucket["served"]]
    assert sorted(served) == sizes


def test_thirteen_is_a_bucket_and_the_summary_shows_it() -> None:
    model = Toy().eval()
    compiled = bucketed((13, 8), [4], model)
    for batch in range(1, 14):
        assert_like_eager(model, compiled, batch, 3)
        assert compiled.bucket_of(batch=batch, length=3) == {"batch": 8 if batch <= 8 else 13, "length": 4}
    assert compiled.compiles == 2
    assert compiled.summary().splitlines() == [
        "batch: 1..8 -> 8, 9..13 -> 13; beyond 13: refused",
        "length: 1..4 -> 4; beyond 4: refused",
        "  batch 8, length 4: 8 calls, 1 graph",
        "  batch 13, length 4: 5 calls, 1 graph",
        "13 calls, 0 eager; 2 graphs for 2 buckets",
    ]


def test_a_size_beyond_the_maximum_is_refused_or_compiled_as_one_says() -> None:
    with pytest.raises(BucketError, match=r"'batch' is 9, beyond the largest of its buckets 4, 8 \(entry 'toy'\)"):
        bucketed((8, 4), [4])(*arguments(9, 3))
    model = Toy().eval()
    compiled = bucketed((8, 4), [4], model, beyond="compile")
    assert_like_eager(model, compiled, 9, 3)
    assert compiled.to_dict()["buckets"][0]["sizes"] == {"batch": 9, "length": 4}
    assert "batch 9, length 4: 1 call, 1 graph, beyond the maximum" in compiled.summary()


def test_an_exact_or_strided_tensor_meets_the_same_graph() -> None:
    model = Toy().eval()
    compiled = bucketed([4], [4], model)
    rows, place, state = arguments(4, 4)
    strided = Rows(rows.values.transpose(0, 1).contiguous().transpose(0, 1), rows.masks)
    with torch.no_grad():
        expected = model(rows, place, state.clone())["out"]
    for given in (rows, strided):
        torch.testing.assert_close(compiled(given, place, state)["out"], expected)
    assert compiled.compiles == 1


class Writes(nn.Module):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        counts.add_(1)
        return x * counts.unsqueeze(-1)


def test_what_a_call_writes_into_a_padded_argument_reaches_the_caller() -> None:
    bound = ("batch", 1, 4)
    entry = Entry("writes", Writes(), (torch.ones(2, 3), torch.zeros(2)), dynamic={"0": {0: bound}, "1": {0: bound}})
    compiled = Bucketed(entry, {"batch": [4]}, fill={"0": 0.0, "1": 0.0}, outputs={"": {0: "batch"}}, options=QUICK)
    counts = torch.tensor([1.0, float("nan"), 5.0])
    out = compiled(torch.ones(3, 3), counts)
    torch.testing.assert_close(counts, torch.tensor([2.0, float("nan"), 6.0]), equal_nan=True)
    torch.testing.assert_close(out[:, 0], counts, equal_nan=True)


class Breaks(Toy):
    def forward(self, rows: Rows, place: Tensor, state: Tensor) -> dict[str, Tensor]:
        torch._dynamo.graph_break()
        return super().forward(rows, place, state)


@torch._dynamo.disable
def as_written(rows: Rows, place: Tensor, state: Tensor) -> dict[str, Tensor]:
    return {"out": rows.values, "count": place}


class Disabled(Toy):
    def forward(self, rows: Rows, place: Tensor, state: Tensor) -> dict[str, Tensor]:
        return as_written(rows, place, state)


@pytest.mark.parametrize("model", [Breaks(), Disabled()])
def test_a_model_that_would_run_eagerly_is_an_error_and_never_a_result(model: nn.Module) -> None:
    compiled = bucketed([4], [4], model)
    with pytest.raises(BucketError, match=r"K31-0210: the call (is not one compiled graph|ran as it is written)"):
        compiled(*arguments(2, 3))
    assert compiled.calls == 0


def test_a_call_that_dynamo_skips_is_an_error_and_is_counted() -> None:
    model = Toy().eval()
    compiled = bucketed([4], [4], model)
    compiled(*arguments(2, 3))
    with torch.compiler.set_stance("force_eager"), pytest.raises(BucketError, match="ran as it is written"):
        compiled(*arguments(2, 3))
    assert compiled.eager == 1
    assert compiled.to_dict()["eager"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fill": {}}, "nothing says with what '0.values' is padded"),
        ({"fill": {**FILL, "0.masks.valid": 0}}, "'0.masks.valid' cannot be padded: 0 is no value of a tensor of bool"),
        ({"fill": {**FILL, "1": 0.5}}, "'1' cannot be padded: 0.5 is no value of int64"),
        ({"fill": {**FILL, "2": 0}}, "fill names '2' .*padded are: 0.values, 0.masks.valid, 1"),
        ({"outputs": {"out": {0: "rows"}}}, "outputs says .*one of batch, length"),
        ({"beyond": "eager"}, "beyond does not take 'eager'; it takes 'refuse' or 'compile'"),
    ],
)
def test_a_wrong_use_says_what_is_missing(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BucketError, match=message):
        bucketed([4], [4], **change)


def test_names_and_calls_that_do_not_fit_are_refused() -> None:
    entry = Entry("toy", Toy(), arguments(2, 3), dynamic=DYNAMIC)
    with pytest.raises(BucketError, match=r"no dimension 'batches' \(entry 'toy'\); it names batch, length"):
        resize_entry(entry, {"batches": 4})
    compiled = bucketed([4], [4])
    rows, _, state = arguments(2, 3)
    with pytest.raises(BucketError, match="'batch' is 2 in one argument and 3 in dimension 0 of '1'"):
        compiled(rows, torch.arange(3), state)
    with pytest.raises(BucketError, match="'1' is missing: there is no argument 1"):
        compiled(rows)
    with pytest.raises(BucketError, match="'1' is a int, not a tensor"):
        compiled(rows, 3, state)
    with pytest.raises(BucketError, match=r"output 'count' is \[4\], and its dimension 0 should be 5, 'length'"):
        bucketed([4], [5], outputs={"count": {0: "length"}})(*arguments(2, 3))
    with pytest.raises(BucketError, match="'batch' is 0, and the least is 1"):
        compiled(*arguments(0, 3))


def test_require_warm_names_what_is_cold_instead_of_compiling(tmp_path: Any) -> None:
    compiled = bucketed([4], [4], options={"cache": str(tmp_path / "graphs"), "require_warm": True})
    with pytest.raises(ColdCompileError, match="not in the cache"):
        compiled(*arguments(2, 3))


BATCHES = 5


def drawn_caches(config: K31Config) -> Caches:
    """Caches in which no row is zero, so that a write anywhere is seen."""
    caches = Caches.allocate(config, BATCHES, 32)
    generator = torch.Generator().manual_seed(5)
    for layer in caches.layers:
        for tensor in layer:
            if tensor is not None:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return caches


def first_requests(caches: Caches, count: int) -> Caches:
    return dataclasses.replace(caches, block_table=caches.block_table[:count], state_rows=caches.state_rows[:count])


@pytest.mark.slow
def test_padding_touches_no_state_of_the_k31_model() -> None:
    config = K31Config.tiny()
    model = K31ForCausalLM(config, seed=0).eval()
    bound = ("batch", 1, BATCHES)
    start = torch.arange(BATCHES) + 4
    tokens = torch.arange(BATCHES)[:, None] + 3
    paths = ("0", "1.block_table", "1.state_rows", "2")
    entry = Entry("tiny", model, (tokens, drawn_caches(config), start), dynamic={path: {0: bound} for path in paths})
    fill = dict.fromkeys(paths, 0)
    compiled = Bucketed(entry, {"batch": (5, 3)}, fill=fill, outputs={"": {0: "batch"}}, options=QUICK)
    for batch in range(1, BATCHES + 1):
        ours, theirs, before = drawn_caches(config), drawn_caches(config), drawn_caches(config)
        with torch.no_grad():
            expected = model(tokens[:batch], first_requests(theirs, batch), start[:batch])
        got = compiled(tokens[:batch], first_requests(ours, batch), start[:batch])
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        for mine, right, old in zip(ours.layers, theirs.layers, before.layers, strict=True):
            for tensor, wanted, untouched in zip(mine, right, old, strict=True):
                if tensor is None:
                    continue
                torch.testing.assert_close(tensor[1:], wanted[1:], rtol=1e-3, atol=1e-4)
                rows = (tensor.shape[0] - 1) // BATCHES * batch  # of a state: one a request; of pages: all of its own
                assert torch.equal(tensor[1 + rows :], untouched[1 + rows :])
    assert (compiled.compiles, compiled.eager) == (2, 0)
