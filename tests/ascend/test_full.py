"""K3.1 at its real sizes, on the meta device: lowered, scheduled, converted and counted for both products."""

import collections
import resource

import pytest

from k31compile.cli.entries import shipped_entries
from k31compile.offline import compile_offline

pytestmark = pytest.mark.slow

# Layers, and of these: KDA, sparse attention with an indexer, experts (the first layer is dense), attention residuals
# (two a layer and one at the output, less the first, which has one source only and is no mixture).
CASES = [(5, 4, 1, 4, 10), (9, 7, 2, 8, 18)]


@pytest.mark.parametrize("target", ["ascend-a3", "ascend-950"])
@pytest.mark.parametrize(("layers", "kda", "attention", "experts", "residuals"), CASES)
def test_every_layer_is_there_and_no_cache_is_copied(target, layers, kda, attention, experts, residuals):
    (entry,) = shipped_entries("full", "decode", "bf16", layers)
    made = compile_offline(entry, target)
    lowered = collections.Counter(decision.operator for decision in made.lowered.decisions)
    assert {name: lowered[name] for name in ("lightning_indexer", "sparse_flash_attention", "grouped_experts")} == {
        "lightning_indexer": attention, "sparse_flash_attention": attention, "grouped_experts": experts,
    }  # fmt: skip
    assert lowered["mega_kda"] == kda
    assert lowered["attn_res_update"] == residuals
    counts = made.ge.counts()
    # 96 heads are 64 and 32 on A3.
    assert counts["SparseFlashAttention"] == attention * (2 if target == "ascend-a3" else 1)
    assert counts["GroupedMatmul"] == 3 * experts
    assert counts["MoeGatingTopK"] == experts
    assert counts["ScatterNdUpdate"] == 2 * kda + 3 * attention
    assert "TensorMove" not in counts
    assert made.schedule.predicted <= made.schedule.serial
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20, "4 GiB, in KiB"


def test_the_950_takes_the_indexer_where_rounding_is_allowed():
    (entry,) = shipped_entries("full", "decode", "bf16", 5)
    made = compile_offline(entry, "ascend-950", may_round=True)
    assert made.ge.counts()["LightningIndexer"] == 1
    assert made.to_dict()["may_round"]
