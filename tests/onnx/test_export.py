"""tiny's fused graphs as ONNX: valid, eager's numbers from onnxruntime, and a call of a function for each fusion."""

import copy
import dataclasses
import json

import pytest
import torch

MISSING = "the extra `onnx` is not installed: pip install -e '.[onnx]'"
onnx = pytest.importorskip("onnx", reason=MISSING)
pytest.importorskip("onnxscript", reason=MISSING)
onnxruntime = pytest.importorskip("onnxruntime", reason=MISSING)

from k31compile.entry import Entry  # noqa: E402
from k31compile.errors import CheckError, TargetError, UsageError  # noqa: E402
from k31compile.kernels.registry import OPERATORS  # noqa: E402
from k31compile.onnx_export.check import compare_with_eager, require_same  # noqa: E402
from k31compile.onnx_export.export import export_entry  # noqa: E402
from k31compile.onnx_export.files import write_model  # noqa: E402

PARTS = [pytest.param(part, marks=pytest.mark.slow) for part in ("prefill", "decode")]


@pytest.mark.parametrize("part", PARTS)
def test_onnxruntime_gives_what_eager_gives(part, exported):
    made = exported(part)
    before = copy.deepcopy(made.entry.args)
    compared = compare_with_eager(made.entry, made.graph, made.path)
    require_same(compared)
    assert {one.name for one in compared} == {value.name for value in made.graph.model.graph.outputs}
    assert sum(one.name.endswith("_out") for one in compared) == 12, "two tensors of three layers, three of two"
    after = made.entry.args
    assert torch.equal(before[0], after[0])
    for old, new in zip(before[1].layers, after[1].layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True)), "the check ran on copies"


@pytest.mark.parametrize("part", PARTS)
def test_each_fused_operator_is_a_call_of_a_function(part, exported):
    made = exported(part)
    model = onnx.load(made.path)
    onnx.checker.check_model(model, full_check=True)
    calls = [node for node in model.graph.node if node.domain == "k31"]
    counted = {name: sum(node.op_type == name for node in calls) for name in OPERATORS}
    assert {name: count for name, count in counted.items() if count} == {
        name: count for name, count in made.fused.items() if name in OPERATORS
    }
    known = {(function.name, function.overload) for function in model.functions}
    assert {(node.op_type, node.overload) for node in calls} == known
    assert len(known) < len(calls), "calls of one kind share their function"
    for function in model.functions:
        assert {node.domain for node in function.node} == {""}, "standard operators alone"
        assert function.doc_string.startswith(f"k31::{function.name} of ")


def test_inputs_outputs_and_weights_have_the_models_names(exported):
    made = exported("decode")
    model = onnx.load(made.path)
    inputs = [value.name for value in model.graph.input]
    assert {"tokens", "start", "caches.block_table", "caches.layers.3.latent"} <= set(inputs)
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    parameters = dict(made.entry.model.named_parameters())
    # the first layer has one sum to look back on, so its two weights choose nothing
    assert {name.rpartition(".")[0] for name in set(parameters) - set(weights)} <= {
        "model.layers.0.attn_res.proj",
        "model.layers.0.attn_res.norm",
    }
    for name in set(parameters) & set(weights):
        assert torch.equal(torch.from_numpy(weights[name].copy()), parameters[name])
    told = {item.key: item.value for item in model.metadata_props}
    written = json.loads(told["k31.written_inputs"])
    assert written["caches.layers.3.latent"] == "caches.layers.3.latent_out"
    assert [value.name for value in model.graph.output] == ["output", *written.values()]
    indexer = next(node for node in model.graph.node if node.op_type == "lightning_indexer")
    assert indexer.name == "model.layers.3.self_attn.indexer.lightning_indexer"
    assert {item.key: item.value for item in indexer.metadata_props}["source"].startswith("model/indexer.py:")


def test_a_changed_weight_is_seen(exported):
    made = exported("decode")
    changed = copy.deepcopy(made.entry.model)
    with torch.no_grad():
        changed.model.layers[2].self_attn.o_proj.weight[0, 0] += 0.05
    compared = compare_with_eager(dataclasses.replace(made.entry, model=changed), made.graph, made.path)
    with pytest.raises(CheckError, match=r"onnxruntime's output differs from eager's by .* of its largest value"):
        require_same(compared)


def test_large_weights_lie_beside_the_model(exported, tmp_path):
    made = exported("decode")
    files = write_model(made.graph, tmp_path / "out.onnx", external_above=1000)
    assert [file.name for file in files] == ["out.onnx", "out.onnx.data"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.onnx", "out.onnx.data"]
    assert files[0].stat().st_size < files[1].stat().st_size
    require_same(compare_with_eager(made.entry, made.graph, files[0]))


class Untranslated(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x) + 1


class Counting(torch.nn.Module):
    """Its own buffer is what it writes, and its input is one of its results."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x, extra):
        self.count.add_(x.sum(0) * self.scale + torch.tensor([0.5, 0.25, 0.125]))
        return {"sum": x + extra["more"][0], "count": self.count * 2}


def test_an_operator_without_translation_is_one_line_with_its_place():
    with pytest.raises(TargetError) as caught:
        export_entry(Entry("bessel", Untranslated(), (torch.randn(3),)))
    assert "prims.bessel_j0 has no translation to ONNX (onnx/test_export.py:" in str(caught.value)


def test_a_model_without_values_is_refused(monkeypatch):
    # Before it is traced: this call could not be.
    monkeypatch.setattr("k31compile.onnx_export.export.captured_graph", None)
    with pytest.raises(UsageError, match="meta stands on the meta device"):
        export_entry(Entry("meta", torch.nn.Linear(3, 3, device="meta"), (torch.randn(2, 3, device="meta"),)))


def test_a_buffer_that_is_written_goes_in_and_comes_out(tmp_path):
    entry = Entry("counting", Counting().eval(), (torch.randn(4, 3), {"more": [torch.randn(4, 3)]}))
    graph = export_entry(entry)
    path = write_model(graph, tmp_path / "counting.onnx")[0]
    assert graph.written == {"count": "count_out"}
    assert {value.name for value in graph.model.graph.inputs} == {"x", "count", "extra.more.0"}
    require_same(compare_with_eager(entry, graph, path))
    assert not entry.model.count.any(), "the buffer was put back"


def test_transformers_kimi_linear(tmp_path, transformers_model):
    transformers_model("kimi_linear")
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "linear_head_dim": 20, "linear_num_heads": 5}
    widths = {"kv_lora_rank": 36, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    layers = {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"]}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.KimiLinearConfig(
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, **sizes, **heads, **widths, **layers, **tokens
    )
    model = transformers.KimiLinearForCausalLM(config).eval()
    ids = torch.randint(3, 199, (2, 22), generator=torch.Generator().manual_seed(1))
    entry = Entry("kimi", model, (ids,), {"use_cache": False})
    graph = export_entry(entry)
    assert graph.counts() == {"gated_rms_norm": 1, "kda_chunk": 1, "short_conv": 1}
    require_same(compare_with_eager(entry, graph, write_model(graph, tmp_path / "kimi.onnx")[0]))


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(6, 6)

    def forward(self, x, gate):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.out.bias
        return self.out(normed * torch.sigmoid(gate))


def test_an_export_leaves_the_operators_as_they_are():
    before = {name: getattr(torch.ops.k31, name).default for name in OPERATORS}
    made = export_entry(Entry("gated", Gated().eval(), (torch.randn(2, 6), torch.randn(2, 6))))
    assert made.counts() == {"gated_rms_norm": 1}
    assert all(getattr(torch.ops.k31, name).default is operator for name, operator in before.items())
