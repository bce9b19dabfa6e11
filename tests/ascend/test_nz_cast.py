"""Our blocks against torchair's own cast on the host: its loop runs here, what stands around it does not."""

import ctypes

import pytest
import torch

from k31compile.passes.layout.fractal_nz import block_columns, nz_shape, to_fractal_nz
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.profiles import profile_of

# std::vector<uint8_t> tng::npu_utils::trans_nd_to_nz<uint8_t>(const std::vector<uint8_t> &, rows, columns, C0)
SYMBOL = "_ZN3tng9npu_utils14trans_nd_to_nzIhEESt6vectorIT_SaIS3_EERKS5_mmm"
SIZES = [(32, 64), (48, 96), (16, 32), (33, 17), (1, 1), (5, 100), (100, 5)]


class Vector(ctypes.Structure):
    """A std::vector as libstdc++ lays it out: begin, end, end of what is reserved."""

    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("reserved", ctypes.c_void_p)]


@pytest.fixture(scope="module")
def torchairs_blocks():
    """Bytes [..., M, N] and the columns of a block -> the blocks, flat, made by torchair."""
    open_session(profile_of("ascend-a3"))
    from torchair.core import _npu_utils

    function = getattr(ctypes.CDLL(_npu_utils.__file__), SYMBOL)
    function.argtypes = [ctypes.POINTER(Vector), ctypes.POINTER(Vector), *[ctypes.c_size_t] * 3]
    function.restype = ctypes.c_void_p

    def call(data, columns):
        data = data.contiguous()
        end = data.data_ptr() + data.numel()
        given, made = Vector(data.data_ptr(), end, end), Vector()
        function(ctypes.byref(made), ctypes.byref(given), data.shape[-2], data.shape[-1], columns)
        return torch.frombuffer(bytearray(ctypes.string_at(made.begin, made.end - made.begin)), dtype=torch.uint8)

    return call


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("sides", SIZES)
def test_one_byte_blocks_are_torchairs(torchairs_blocks, sides, batch):
    matrix = torch.randint(0, 256, (*batch, *sides), dtype=torch.uint8)
    assert torch.equal(torchairs_blocks(matrix, 32), to_fractal_nz(matrix).flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sides", SIZES)
def test_wider_elements_are_where_torchair_puts_them(torchairs_blocks, sides, dtype):
    """torchair has the loop for bytes alone: each byte of an element is a plane, with the columns of the element."""
    drawn = torch.randint(0, 256, (sides[0], sides[1] * dtype.itemsize), dtype=torch.uint8)
    matrix = drawn.view(dtype)
    ours = to_fractal_nz(matrix).view(torch.uint8).reshape(-1, dtype.itemsize)
    for plane in range(dtype.itemsize):
        theirs = torchairs_blocks(drawn.view(*sides, dtype.itemsize)[..., plane], block_columns(dtype))
        assert torch.equal(theirs, ours[:, plane])
    assert ours.numel() == torch.Size(nz_shape(sides, dtype)).numel() * dtype.itemsize


def test_the_casts_themselves_need_a_device():
    """Why no whole call is compared: the host's cast takes int8 alone and puts its result onto an NPU."""
    open_session(profile_of("ascend-a3"))
    import torch_npu
    import torchair

    with pytest.raises(RuntimeError, match="Expected NPU tensor"):
        torchair.npu_format_cast_via_cpu(torch.zeros(32, 32, dtype=torch.int8), 29)
    with pytest.raises(RuntimeError, match="Cpu weight is not supported"):
        torchair.use_internal_format_weight(torch.nn.Linear(32, 32))
    with pytest.raises(NotImplementedError, match="npu_format_cast"):
        torch_npu.npu_format_cast(torch.zeros(32, 32), 29)
