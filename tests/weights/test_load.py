"""Loading: the record against the model, the original bit for bit, one cast on a device that is not here."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from k31compile.errors import MissingDependencyError, WeightFileError
from k31compile.targets.ascend.cast_weights import FRACTAL_NZ, cast_weights, is_cast
from k31compile.weights import convert, load


class Tied(nn.Module):
    """An embedding that is the head too, a linear layer read twice, a stack of experts, and odd sizes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.up = nn.Linear(32, 48)
        self.odd = nn.Linear(33, 17, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 32, 64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids):
        x = self.embed(ids)
        y = torch.einsum("btd,edf->btf", x, self.experts)
        return self.head(x) + y + self.up(x).sum() + self.odd.weight.sum()


def seeded(seed, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    model = Tied().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def saved(model, path, **without):
    tensors = {name: value.clone() for name, value in model.state_dict().items() if name not in without}
    save_file(tensors, path, {"format": "pt"})
    return path


@pytest.fixture
def blocks(tmp_path):
    """A model and the folder of its weights in blocks."""
    model = seeded(1)
    convert(saved(model, tmp_path / "model.safetensors"), tmp_path / "nz")
    return model, tmp_path / "nz"


def same(left, right):
    return all(torch.equal(value, right.state_dict()[name]) for name, value in left.state_dict().items())


def test_blocks_become_the_original_and_parameters_stay_themselves(blocks):
    model, folder = blocks
    other = seeded(2)
    other.up.weight.mine = "kept"
    before = {name: (id(p), p.shape, p.stride()) for name, p in other.named_parameters()}
    pointers = {name: p.data_ptr() for name, p in other.named_parameters()}
    assert load(folder, other) == []
    assert same(model, other)
    assert before == {name: (id(p), p.shape, p.stride()) for name, p in other.named_parameters()}
    assert pointers == {name: p.data_ptr() for name, p in other.named_parameters()}
    assert other.up.weight.mine == "kept"
    assert other.head.weight is other.embed.weight


def test_saved_and_loaded_in_another_process_it_has_the_same_logits(blocks, tmp_path):
    model, folder = blocks
    ids = torch.arange(6).view(2, 3)
    torch.save({"ids": ids, "logits": model(ids).detach()}, tmp_path / "expected.pt")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import torch; from test_load import seeded; "
        "from k31compile.weights import load; model = seeded(9); load(sys.argv[2], model); "
        "data = torch.load(sys.argv[3]); assert torch.equal(model(data['ids']), data['logits'])"
    )
    here = __file__.rpartition("/")[0]
    arguments = [here, str(folder), str(tmp_path / "expected.pt")]
    done = subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_of_a_tie_may_be_missing_but_not_differ(tmp_path):
    model = seeded(1)
    other = seeded(2)
    load(saved(model, tmp_path / "a.safetensors", **{"head.weight": 1}), other)
    assert same(model, other)
    load(saved(model, tmp_path / "b.safetensors"), seeded(2))
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    tensors["head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "c.safetensors")
    with pytest.raises(WeightFileError, match=r"embed.weight and head.weight are one parameter"):
        load(tmp_path / "c.safetensors", other)
    assert same(model, other)


def test_blocks_without_their_record_are_refused(blocks, tmp_path):
    model, folder = blocks
    save_file(load_file(folder / "model.safetensors"), tmp_path / "lost.safetensors")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        WeightFileError, match=r"the shape of its blocks, and the file's record of layouts is gone"
    ) as e:
        load(tmp_path / "lost.safetensors", model)
    assert "\n" not in str(e.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace('"shape":[48,32]', '"shape":[48,16]'), "up.weight is recorded as nz of BF16"),
        (lambda text: text.replace('"layout":"nz"', '"layout":"zz"', 1), "not nd or nz"),
        (lambda text: text.replace('"version":1', '"version":2'), "has version 2"),
        (lambda text: text.replace("up.weight", "down.weight"), "record of layouts and its tensors differ"),
        (lambda text: text[:-4], "record of layouts is damaged"),
        (lambda text: "[]", "record of layouts is damaged"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(blocks, tmp_path, change, says):
    from safetensors import safe_open

    model, folder = blocks
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        text = opened.metadata()["k31.layout"]
    path = tmp_path / "wrong.safetensors"
    save_file(load_file(folder / "model.safetensors"), path, {"k31.layout": change(text)})
    with pytest.raises(WeightFileError, match=says):
        load(path, model)


def test_names_shapes_and_dtypes_must_fit(blocks, tmp_path):
    model, folder = blocks
    small = nn.ModuleDict({"up": nn.Linear(32, 16).bfloat16()})
    with pytest.raises(WeightFileError) as caught:
        load(folder, small)
    assert all(part in str(caught.value) for part in ("the model has no embed.weight", "nothing was loaded", "more)"))
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    tensors["steps"] = torch.zeros((), dtype=torch.int32)
    save_file(tensors, tmp_path / "int.safetensors")
    with pytest.raises(WeightFileError, match="steps is I32, the model has int64"):
        load(tmp_path / "int.safetensors", model)
    with torch.device("meta"), pytest.raises(WeightFileError, match="meta device"):
        load(folder, Tied().bfloat16())


def test_a_model_of_another_floating_dtype_gets_the_values(blocks):
    model, folder = blocks
    other = seeded(2, torch.float32)
    load(folder, other)
    assert torch.equal(other.up.weight, model.up.weight.float())


class FakeCast:
    """Stands for torch_npu.npu_format_cast: other memory, the same values as seen from Python."""

    def __init__(self):
        self.calls = []

    def __call__(self, tensor, number):
        assert number == FRACTAL_NZ
        assert not isinstance(tensor, nn.Parameter)
        self.calls.append(tensor.data_ptr())
        return tensor.clone()


def test_on_a_device_each_weight_in_blocks_is_cast_once(blocks):
    model, folder = blocks
    other, cast = seeded(2), FakeCast()
    parameters = dict(other.named_parameters())
    names = load(folder, other, cast)
    assert set(names) == {"up.weight", "experts", "head.weight"}  # by its second name the embedding is a head
    assert len(cast.calls) == 3
    assert same(model, other)
    assert other.head.weight is other.embed.weight
    assert all(parameters[name] is p for name, p in other.named_parameters())
    assert all(is_cast(parameters[name]) for name in ("up.weight", "experts", "embed.weight"))
    cast_weights({name: other.get_parameter(name) for name in names}, cast)
    assert len(cast.calls) == 3


def test_new_values_are_cast_again_and_only_those():
    model, cast = seeded(1), FakeCast()
    chosen = {"up.weight": model.up.weight, "experts": model.experts}
    assert cast_weights(chosen, cast) == ["up.weight", "experts"]
    assert cast_weights(chosen, cast) == []
    model.up.load_state_dict(seeded(3).up.state_dict())
    assert cast_weights(chosen, cast) == ["up.weight"]
    assert torch.equal(model.up.weight, seeded(3).up.weight)
    model.experts.data = seeded(4).experts.data
    assert cast_weights(chosen, cast) == ["experts"]
    assert cast_weights(chosen, cast) == []


def test_a_tie_by_memory_is_cast_once_and_stays_one():
    model, cast = seeded(1), FakeCast()
    twin = nn.Parameter(model.up.weight.data)
    assert cast_weights({"a": model.up.weight, "b": twin, "c": model.up.weight}, cast) == ["a"]
    assert twin.data_ptr() == model.up.weight.data_ptr()
    assert len(cast.calls) == 1
    assert cast_weights({"b": twin}, cast) == []


def test_without_torch_npu_a_cast_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(MissingDependencyError, match="casting weights to blocks needs torch_npu"):
        cast_weights({"w": nn.Parameter(torch.zeros(16, 16))})


def test_it_is_torch_npus_public_function_that_is_called(monkeypatch):
    import types

    cast = FakeCast()
    module = types.ModuleType("torch_npu")
    module.npu_format_cast = cast
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    assert cast_weights({"w": nn.Parameter(torch.zeros(16, 16))}) == ["w"]
    assert len(cast.calls) == 1
