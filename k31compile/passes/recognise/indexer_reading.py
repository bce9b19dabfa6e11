"""One assignment of leaves to q, k and w against an indexer's region: samples, comparison, operator (K3.1 spec 2.8)."""

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from k31compile.graph.confirm import Mismatch, Reading
from k31compile.graph.constants import largest_constant
from k31compile.graph.layout import Layout
from k31compile.graph.region import Region
from k31compile.graph.shrink import shrunk_pool, shrunk_sizes
from k31compile.graph.sizes import (
    Substitution,
    expression_of,
    hint,
    is_float,
    shape_of,
    shape_under,
    substitute,
    symbols_of,
    value_of,
)
from k31compile.passes.recognise.indexer_diagnosis import diagnose
from k31compile.passes.recognise.masks import MaskLeaf, sample_mask
from k31compile.passes.recognise.operands import (
    Dense,
    FlatHeads,
    Paged,
    Values,
    sample_table,
    spread,
)
from k31compile.passes.recognise.selection import Selection
from k31compile.passes.recognise.visibility import Visibility, hypotheses, masked_hypotheses, sample_counts

HIDDEN = -1e30
ERROR_LIMIT = 1e-9


class IndexerReading(Reading):
    """Leaves read as q, k (dense or paged), w, lengths and a mask."""

    name = "lightning_indexer"

    def __init__(
        self,
        region: Region,
        selection: Selection,
        scores: Layout,
        query: Dense,
        key: Dense | Paged,
        weights: Dense,
        counts: list[fx.Node],
        mask: MaskLeaf | None = None,
    ) -> None:
        """One assignment of leaves to roles, not yet confirmed."""
        self.region, self.selection, self.scores_layout = region, selection, scores
        self.query, self.key, self.weights, self.counts, self.mask = query, key, weights, counts, mask
        self.extra_operands = (selection.count,) if isinstance(selection.count, fx.Node) else ()
        self.learned: dict[str, Any] = {}

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes and forget what earlier samples taught."""
        self._sizes = substitution
        self._letters = self._letters_under(substitution)
        found = hypotheses(self.counts, self.query.size("b"), self.query.size("t"))
        self._candidates = masked_hypotheses(found, self.mask)
        self._scale: float | None = None
        self._trials = 0
        self._tails: set[str] = set()

    def substitutions(self) -> list[Substitution]:
        """Symbols made small, and lengths too where they are large."""
        symbols = self._choose_symbols()
        letters = self._letters_under(symbols)
        page = shape_of(self.key.pages)[1] if isinstance(self.key, Paged) else 0
        others = [letters["h"], letters["d"]]
        others += [letters["h"] * letters["d"]] if isinstance(self.query, FlatHeads) else []
        small = shrunk_sizes(letters, others, page, self._beyond()) if not symbols else {}
        if small and isinstance(self.key, Paged):
            small |= shrunk_pool(shape_of(self.key.pages), letters["b"], small, letters["s"])
        return [{**symbols, **small}, symbols] if small else [symbols]

    def _beyond(self) -> int:
        """The largest number that hides or shows keys, a sliding window's width for one."""
        lengths = [hint(size) for size in value_of(self.selection.scores).shape]
        return largest_constant(self.region.nodes, [*lengths, self._largest_count(self._count())])

    def _count(self) -> Any:
        count = self.selection.count
        return value_of(count) if isinstance(count, fx.Node) else count

    def _choose_symbols(self) -> dict[sympy.Symbol | int, int]:
        """Small odd sizes, but three times more keys than are chosen: with fewer, every wrong score looks right."""
        shape = value_of(self.selection.scores).shape
        chosen: dict[sympy.Symbol | int, int] = {symbol: 5 + 2 * i for i, symbol in enumerate(symbols_of(shape))}
        keys = max(3 * self._largest_count(self._count()) + 7, 2 * self._beyond() + 3)
        for symbol in symbols_of([shape[self.selection.dim]]):
            chosen[symbol] = keys
        return chosen

    @staticmethod
    def _largest_count(count: Any) -> int:
        if not isinstance(count, torch.SymInt):
            return int(count)
        expression = expression_of(count)
        # torch has a Min of its own beside sympy's.
        constants = [int(a) for a in expression.args if a.is_Integer] if type(expression).__name__ == "Min" else []
        return min(constants) if constants else hint(count)

    def _letters_under(self, substitution: Substitution) -> dict[str, int]:
        shape = shape_under(self.selection.scores, substitution)
        letters = {letter: self.scores_layout.size(letter, shape) for letter in "bts"}
        letters["h"] = self.weights.size("h", substitution)
        letters["d"] = self.query.size("d", substitution)
        letters["k"] = substitute(self._count(), substitution)
        return letters

    def sizes(self) -> Mapping[str, int]:
        """B, T, S, H, D, K."""
        return {letter.upper(): size for letter, size in self._letters.items()}

    def sample(self, generator: torch.Generator, trial: int) -> dict[fx.Node, torch.Tensor]:
        """q, k, w over four decades, weights of both signs; positions at both ends of their range."""
        b, t, s, h, d = (self._letters[x] for x in "btshd")
        # Extremes show what clamps, caps or adds: a relu has neither a ceiling nor a floor above zero.
        extreme = (1.0, 1e-6, 1e8, 1.0)[trial % 4]
        sample = self.query.place(extreme * spread((b, t, h, d), generator, 2, 3))
        sample |= self.weights.place(spread((b, t, h), generator, 1, 3))
        keys = spread((b, s, d), generator, 1, 2)
        if isinstance(self.key, Paged):
            shape = shape_under(self.key.pages, self._sizes)
            table = sample_table(self.key.table, shape[0], self._sizes, generator)
            sample |= self.key.place(keys, table, shape) | {self.key.table: table}
        else:
            sample |= self.key.place(keys)
        sample |= sample_counts(self.counts, lambda leaf: shape_under(leaf, self._sizes), t, s, generator, trial)
        if self.mask is not None:
            sample |= sample_mask(self.mask, shape_under(self.mask.leaf, self._sizes), generator, trial)
        self._keys = keys
        return sample

    def judge(self, sample: Mapping[fx.Node, torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
        """Scores equal up to one positive factor, hidden keys a suffix, chosen keys the best visible ones."""
        b, t, s = (self._letters[x] for x in "bts")
        got = self.scores_layout.canonical(outputs[0] if self.selection.largest else -outputs[0])
        query, weights = self.query.canonical(sample), self.weights.canonical(sample)
        dots = torch.einsum("bthd,bsd->bths", query, self._keys)
        exact = (weights[..., None] * dots.relu()).sum(2)
        size = (weights.abs()[..., None] * torch.einsum("bthd,bsd->bths", query.abs(), self._keys.abs())).sum(2)
        hidden = ~(got > HIDDEN)
        bias = torch.zeros_like(got) if self.mask is None else self.mask.bias(sample, (b, t, s))
        error = self._score_error(got, exact, size, hidden, bias, (query, self._keys, weights))
        self._keep_visible(sample, hidden)
        seen = self._candidates[0].seen(sample, (b, t, s))
        chosen = outputs[1].to(torch.int64)
        # Without a bias the factor changes nothing but could round: the order is that of the exact scores.
        ranking = exact if self._adds_nothing() else (self._scale or 1.0) * exact + bias
        self._check_chosen(self.selection.canonical_indices(chosen, self.scores_layout), ranking, seen)
        self.learned = {"visibility": self._candidates[0], "tail": self._tail(), "scale": self._scale or 1.0}
        return error

    def _score_error(
        self,
        got: torch.Tensor,
        exact: torch.Tensor,
        size: torch.Tensor,
        hidden: torch.Tensor,
        bias: torch.Tensor,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> float:
        alive = ~hidden
        self._trials += 1
        scale = self._scale
        if scale is None:
            plain = alive & (bias == 0)
            unit = torch.where(plain, exact / size, 0.0)
            weight = float(unit.square().sum())
            if weight == 0.0 and not bool(got[plain].any()):
                if self._trials == self.samples():
                    raise Mismatch("every key is hidden on samples")
                return 0.0
            scale = float((torch.where(plain, got / size, 0.0) * unit).sum()) / max(weight, 1e-300)
        scores, room = got - bias, abs(scale) * size + bias.abs() + 1e-300
        error = float(torch.where(alive, (scores - scale * exact).abs() / room, 0.0).max())
        if not (error < ERROR_LIMIT) or scale <= 0:
            raise Mismatch(diagnose(scores, hidden, *operands))
        self._scale = scale
        return error

    def _keep_visible(self, sample: Values, hidden: torch.Tensor) -> None:
        b, t, s = (self._letters[x] for x in "bts")
        keep = [form for form in self._candidates if torch.equal(~form.seen(sample, (b, t, s)), hidden)]
        if not keep:
            row = int(hidden.sum(-1).flatten().argmax())
            raise Mismatch(
                f"keys are hidden by another rule than {self._rule()}: "
                f"row {row % t} hides {int(hidden.reshape(-1, s)[row].sum())} of {s} keys"
            )
        self._candidates = keep

    def _rule(self) -> str:
        return "'a row sees the keys up to its position'" if self.mask is None else f"the mask {self.mask.leaf.name}"

    def _adds_nothing(self) -> bool:
        return self.mask is None or not is_float(self.mask.leaf)

    def _check_chosen(self, chosen: torch.Tensor, exact: torch.Tensor, seen: torch.Tensor) -> None:
        count, s = self._letters["k"], self._letters["s"]
        slot = torch.arange(count)
        if not self.selection.sorted:
            # Nothing was promised of the order: hidden keys may stand among the seen ones.
            is_empty = ~_names_seen(chosen, seen)
            chosen = chosen.gather(-1, is_empty.to(torch.int8).sort(dim=-1, stable=True).indices)
        valid = slot < seen.sum(-1, keepdim=True)
        if bool((valid & ~_names_seen(chosen, seen)).any()):
            raise Mismatch("the selection names keys that the row does not see, although enough are visible")
        ranked = exact.masked_fill(~seen, -torch.inf).sort(-1, descending=True).values[..., :count]
        picked = exact.gather(-1, chosen.clamp(0, s - 1))
        if not self.selection.sorted:
            picked = picked.masked_fill(~valid, -torch.inf).sort(-1, descending=True).values
        if not torch.equal(torch.where(valid, picked, 0.0), torch.where(valid, ranked, 0.0)):
            raise Mismatch("the selection is not the best visible keys, best first")
        distinct = torch.where(chosen < 0, s + slot, chosen)
        if bool((distinct.sort(-1).values.diff(dim=-1) == 0).any()):
            raise Mismatch(
                "the selection names a key twice, or marks slots without a visible key by something else than -1"
            )
        empty = chosen[~valid]
        if empty.numel():
            hidden = bool(((empty >= 0) & (empty < s) & ~_names_seen(chosen, seen)[~valid]).all())
            self._tails.add("minus_one" if bool((empty == -1).all()) else "lowest" if hidden else "?")

    def _tail(self) -> str:
        if self._tails - {"minus_one", "lowest"} or len(self._tails) > 1:
            raise Mismatch("slots without a visible key are marked by something else than -1")
        return next(iter(self._tails), "lowest")

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator with its contract as the author's: best first, empty slots as the author left them."""
        values = dict(zip(self.region.leaves, leaves, strict=False))
        count = leaves[-1] if self.extra_operands else self.selection.count
        visibility: Visibility = self.learned["visibility"]
        query = self.query.canonical(values)
        mode, rows, lengths = visibility.lengths(values, query)
        paged = isinstance(self.key, Paged)
        weights = self.weights.canonical(values)
        if not self._adds_nothing():
            # What is added weighs against the scores, so their factor counts here.
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32)) * self.learned["scale"]
        chosen = torch.ops.k31.lightning_indexer(
            query,
            self.key.cache(values) if isinstance(self.key, Paged) else self.key.canonical(values).unsqueeze(2),
            weights,
            actual_seq_lengths_query=rows,
            actual_seq_lengths_key=lengths,
            block_table=values[self.key.table] if isinstance(self.key, Paged) else None,
            layout_key="PA_BSND" if paged else "BSND",
            sparse_count=count,
            sparse_mode=mode,
            order="score" if self.selection.sorted else "position",
            tail=self.learned["tail"],
            mask=visibility.operand(values),
        )
        output = value_of(self.region.outputs[1])
        restored = self.selection.restore_indices(chosen.squeeze(2), self.scores_layout, output.dim())
        return (restored.to(output.dtype),)


def _names_seen(chosen: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Which of the chosen [B, T, K] are keys that the row sees, by `seen` [B, T, S]."""
    s = seen.shape[-1]
    return (chosen >= 0) & (chosen < s) & seen.gather(-1, chosen.clamp(0, s - 1))
