"""The operators as torch sees them: fakes, symbolic sizes, compilation, autocast, modes, and who serves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.kernels.library import register_operator

ROOT = Path(__file__).parents[2]


def index(query, key, weights, **kwargs):
    return torch.ops.k31.lightning_indexer(query, key, weights, **{"sparse_count": 6} | kwargs)


def attend(query, key, value, indices, **kwargs):
    return torch.ops.k31.sparse_flash_attention(query, key, value, indices, 0.3, **kwargs)


def chain(query, key, weights):
    return attend(query, key, key, index(query, key, weights))


def draw(rows=5, positions=19, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(2, rows, 4, 8, generator=generator).to(dtype)
    key = torch.randn(2, positions, 1, 8, generator=generator).to(dtype)
    return query, key, torch.randn(2, rows, 4, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_fake_agrees_with_real(dtype):
    query, key, weights = draw(dtype=dtype)
    value = key[..., :5]
    chosen = index(query, key, weights)
    real = (chosen, attend(query, key, value, chosen))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (query, key, weights, value)]
        fake_chosen = index(*fakes[:3])
        fake = (fake_chosen, attend(fakes[0], fakes[1], fakes[3], fake_chosen))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


def test_symbolic_sizes_stay_symbolic():
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)

    def symbolic(tensor):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
        return mode.from_tensor(tensor, symbolic_context=context)

    query, key, weights = map(symbolic, draw())
    with mode:
        chosen = index(query, key, weights, sparse_count=key.shape[1])
        result = attend(query, key, key, chosen)
    sizes = (*chosen.shape[:2], chosen.shape[3], *result.shape)
    assert all(isinstance(size, torch.SymInt) for size in sizes)
    assert not environment.guards


@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor"])
def test_opcheck(utility):
    query, key, weights = draw()
    arguments = {"sparse_count": 6, "actual_seq_lengths_key": torch.tensor([19, 7])}
    torch.library.opcheck(torch.ops.k31.lightning_indexer.default, (query, key, weights), arguments, test_utils=utility)
    chosen = index(query, key, weights)
    torch.library.opcheck(
        torch.ops.k31.sparse_flash_attention.default, (query, key, key, chosen, 0.3), test_utils=utility
    )


def test_inside_inductor():
    compiled = torch.compile(lambda q, k, w: chain(q * 2, k, w).relu(), backend="inductor", fullgraph=True)
    for rows in (5, 7, 8):
        arguments = draw(rows, rows + 11)
        expected = chain(arguments[0] * 2, *arguments[1:]).relu()
        torch.testing.assert_close(compiled(*arguments), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    with mode():
        arguments = draw()
        assert chain(*arguments).shape == arguments[0].shape


def test_under_autocast_whatever_arrives_is_converted():
    query, key, weights = draw()
    mixer = torch.eye(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = query @ mixer  # bfloat16 here, float32 outside
        assert half.dtype == torch.bfloat16
        chosen = index(half, key, weights)
        got = attend(half, key, key, chosen)
    assert torch.equal(chosen, index(query.bfloat16().float(), key, weights))
    assert got.dtype == torch.bfloat16
    exact = attend(query.bfloat16().double(), key.double(), key.double(), chosen)
    torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_what_the_kernels_do_not_read_goes_to_the_reference(dtype):
    arguments = draw(dtype=dtype)
    chosen = index(*arguments)
    assert torch.equal(chosen, kernels.lightning_indexer_reference(*arguments, sparse_count=6))
    for operator in kernels.OPERATORS.values():
        declined = operator.providers[0].declines(arguments[0], arguments[1], arguments[1])
        assert declined is not None
        assert str(dtype) in declined


def test_meta_tensors_have_results_too():
    query, key, weights = (x.to("meta") for x in draw())
    assert chain(query, key, weights).shape == query.shape


def test_every_operator_ends_with_its_reference():
    assert {"lightning_indexer", "sparse_flash_attention"} <= set(kernels.OPERATORS)
    for name, operator in kernels.OPERATORS.items():
        assert operator.providers[-1].run is operator.reference
        assert operator.schema.startswith(name)
        choice = kernels.provider_for(name)
        assert choice.provider in {provider.name for provider in operator.providers}
        assert choice.why
    with pytest.raises(KeyError, match="no operator k31::lightning_index; known"):
        kernels.provider_for("lightning_index")


def test_a_name_is_taken_once():
    operator = kernels.OPERATORS["lightning_indexer"]
    with pytest.raises(ValueError, match="defined twice"):
        register_operator(operator.schema, fake=operator.reference, reference=operator.reference)


def test_the_short_name_is_refused(tmp_path):
    (tmp_path / "kernels").symlink_to(ROOT / "k31compile" / "kernels")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = subprocess.run(
        [sys.executable, "-c", "import kernels"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert run.returncode
    assert "import k31compile.kernels instead of kernels" in run.stderr


def test_no_heads_score_nothing_and_positions_decide():
    query, key, weights = draw()
    got = index(query[:, :, :0], key, weights[:, :, :0], sparse_mode=0)
    assert torch.equal(got, torch.arange(6, dtype=torch.int32).expand(2, 5, 1, 6))


def test_a_default_device_elsewhere_changes_nothing():
    arguments = draw()
    expected = chain(*arguments)
    with torch.device("meta"):
        assert torch.equal(chain(*arguments), expected)


def test_a_block_table_on_another_device_is_refused():
    query, key, weights = draw()
    table = torch.zeros(2, 1, dtype=torch.int32, device="meta")
    for operator in kernels.OPERATORS["lightning_indexer"].providers:
        with pytest.raises(OperatorError, match="block_table is on meta, key on cpu"):
            operator.run(query, key, weights, block_table=table, layout_key="PA_BSND")
