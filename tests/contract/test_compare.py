"""What breaks a contract and what does not, on graphs and reports written by hand."""

from typing import Any

import pytest

from k31compile.contract.compare import ALLOWED_GROWTH, INSIDE, compare, place_of
from k31compile.contract.lockfile import Graph
from k31compile.report import Refusal, Report


def graph(layers: dict[str, dict[str, int]], peak: int = 1000, number: int = 1, **more: Any) -> Graph:
    memory = {"weights": 1, "inputs": 1, "peak": peak, "at": "m.py:40"}
    return Graph("small", number, more.pop("inputs", ("int64[1, 5]",)), layers, more.pop("contains", {}), memory)


def report(*refused: Refusal, lines: dict[str, str] | None = None, notes: tuple[str, ...] = ()) -> Report:
    known = {"layers.2.attn": "m.py:20", "layers.3.attn": "m.py:30"} if lines is None else lines
    return Report(refused=list(refused), lines=known, notes=list(notes))


BOTH = {"layers.2.attn": {"kda_chunk": 1}, "layers.3.attn": {"kda_chunk": 1, "short_conv": 3}}


def test_what_is_the_same_is_kept_without_a_word() -> None:
    verdict = compare([graph(BOTH)], [graph(BOTH)], report())
    assert verdict.ok
    assert verdict.notes == verdict.lines() == []


def test_a_loss_names_layer_operator_counts_reason_line_and_remedy() -> None:
    refused = [
        Refusal("kda_chunk", "its decay is outside", "m.py:21", "move it", True, ("layers.2.attn",)),
        Refusal("kda_chunk", "its gate is summed", "m.py:33", "sum it later", False, ("layers.3.attn",)),
        Refusal("short_conv", "dilation", "m.py:34", "", True, ("layers.3.attn",)),
    ]
    found = {"layers.2.attn": {"kda_chunk": 1}, "layers.3.attn": {"short_conv": 3}}
    verdict = compare([graph(BOTH)], [graph(found)], report(*refused))
    assert verdict.lines() == [
        "small: layers.3.attn lost kda_chunk (promised 1, found 0): its gate is summed (m.py:33); sum it later"
    ]
    assert not verdict.ok


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (report(), "nothing there resembles it any more (m.py:30)"),
        (report(lines={"layers.2.attn": "m.py:20"}), "nothing of that layer was compiled here (m.py:20)"),
        (report(lines={}, notes=("it wants gradients",)), "it wants gradients (line unknown)"),
        (report(notes=("pass fuse_kda_chunk was undone: it broke",)), "pass fuse_kda_chunk was undone: it broke"),
        (report(Refusal("kda_chunk", "too far", "m.py:9", "", True, ("layers.2.attn",))), "nothing there resembles"),
        (report(Refusal("kda_chunk", "a neighbour", "m.py:9", "", True, ("layers.3.gate",))), "a neighbour (m.py:9)"),
    ],
)
def test_a_loss_without_a_refusal_of_its_own_still_has_a_reason_and_a_line(told: Report, says: str) -> None:
    found = {"layers.2.attn": {"kda_chunk": 1}, "layers.3.attn": {"short_conv": 3}}
    (line,) = compare([graph(BOTH)], [graph(found)], told).lines()
    assert says in line


def test_what_is_lost_with_another_says_so() -> None:
    refused = Refusal("short_conv", "dilation", "m.py:34", "use none", True, ("layers.3.attn",))
    found = {"layers.2.attn": {"kda_chunk": 1}}
    lines = compare([graph(BOTH)], [graph(found)], report(refused)).lines()
    assert lines[0].startswith("small: layers.3.attn lost kda_chunk (promised 1, found 0): it is lost together with")
    assert "short_conv (m.py:34); use none" in lines[0]
    assert "lost short_conv (promised 3, found 0): dilation" in lines[1]


def test_a_loss_here_is_not_paid_by_a_gain_in_another_layer() -> None:
    found = {"layers.2.attn": {"kda_chunk": 2}, "layers.3.attn": {"short_conv": 3}}
    verdict = compare([graph(BOTH)], [graph(found)], report())
    assert [(loss.layer, loss.name) for loss in verdict.losses] == [("layers.3.attn", "kda_chunk")]
    assert verdict.notes == ["gained: 1 x kda_chunk in layers.2.attn"]


@pytest.mark.parametrize(
    "found",
    [
        {"layers.2.attn": {"kda_chunk": 1}, "layers.3.attn": {"short_conv": 3}, "layers.3.core.rule": {"kda_chunk": 1}},
        {f"model.{path}": counts for path, counts in BOTH.items()},
    ],
    ids=["another module of the layer", "the whole model inside another"],
)
def test_what_moved_is_not_lost(found: dict[str, dict[str, int]]) -> None:
    verdict = compare([graph(BOTH)], [graph(found)], report())
    assert verdict.ok
    assert verdict.notes == []


def test_what_a_larger_operator_took_in_is_not_lost() -> None:
    mega = {"layers.2.attn": {"kda_chunk": 1}, "layers.3.attn": {"mega_kda": 1}}
    taken = graph(mega, contains={"kda_chunk": 1, "short_conv": 3})
    verdict = compare([graph(BOTH)], [taken], report())
    assert verdict.ok
    assert verdict.notes == ["gained: 1 x mega_kda in layers.3.attn"]
    # one short convolution that it did not take in is missing
    less = graph(mega, contains={"kda_chunk": 1, "short_conv": 2})
    assert [loss.name for loss in compare([graph(BOTH)], [less], report()).losses] == ["short_conv"]
    # and where the larger one is lost, its parts on their own are not missing, or only those that are
    back = compare([taken], [graph(BOTH)], report())
    assert [(loss.layer, loss.name) for loss in back.losses] == [("layers.3.attn", "mega_kda")]
    partly = compare([taken], [graph({**mega, "layers.3.attn": {"kda_chunk": 1}})], report())
    assert [(loss.layer, loss.name) for loss in partly.losses] == [
        ("layers.3.attn", "mega_kda"),
        (INSIDE, "short_conv"),
    ]


def test_a_graph_break_alone_breaks_nothing_but_memory_is_not_compared() -> None:
    halves = [graph({path: counts}, 500, n) for n, (path, counts) in enumerate(BOTH.items(), 1)]
    verdict = compare([graph(BOTH)], halves, report())
    assert verdict.ok
    assert verdict.notes == ["the graphs' inputs are not those of the contract: memory was not compared"]


def test_memory_may_grow_by_the_tolerance_and_no_more() -> None:
    allowed = round(1000 * (1 + ALLOWED_GROWTH))
    assert compare([graph(BOTH)], [graph(BOTH, allowed)], report()).ok
    (line,) = compare([graph(BOTH)], [graph(BOTH, allowed + 1)], report()).lines()
    assert line == (
        "small: graph 1 needs 1051 bytes at its peak, 5% more than the 1000 promised (5% are allowed); "
        "the peak is at m.py:40"
    )
    less = compare([graph(BOTH)], [graph(BOTH, 500)], report())
    assert less.ok
    assert less.notes == ["gained: graph 1 needs 500 bytes at its peak, 1000 were promised"]
    assert compare([graph(BOTH)], [graph(BOTH, 9999, inputs=("int64[1, 6]",))], report()).ok


@pytest.mark.parametrize(
    ("path", "place"),
    [("model.layers.3.attn.conv", "model.layers.3"), ("layers.0", "layers.0"), ("head", ""), ("", "")],
)
def test_a_layer_is_a_path_up_to_its_last_number(path: str, place: str) -> None:
    assert place_of(path) == place
