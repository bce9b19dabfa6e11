"""What becomes of the library where torch's headers are not there, or the compiler does not take them."""

import ctypes

import pytest

from k31compile.errors import BuildError
from k31compile.kernels.cpu import build, compile_units
from k31compile.kernels.cpu.compile_units import UNIT_FLAGS, compile_library
from k31compile.kernels.cpu.direct_calls import count_calls, take_over_calls

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")

KERNEL = 'extern "C" __attribute__((visibility("default"))) int kernel() { return 7; }\n'
TAKES_OVER = 'extern "C" __attribute__((visibility("default"))) long k31_take_over_calls(long* known) '


@pytest.fixture
def compiled(tmp_path):
    """Compile units given by name and content; the library."""

    def run(calls_torch=True, **units):
        paths = []
        for name, content in units.items():
            paths.append(tmp_path / f"{name}.cpp")
            paths[-1].write_text(content)
        made = tmp_path / "made.so"
        compile_library([*build.compiler(), *UNIT_FLAGS, "-O0"], paths, made, calls_torch=calls_torch)
        assert ctypes.CDLL(str(made)).kernel() == 7
        return made

    return run


def test_a_kernel_that_is_refused_is_quoted(compiled):
    with pytest.raises(BuildError, match=r"refused the kernels: .*no such thing"):
        compiled(other=KERNEL, kernel="#error no such thing\n")


def test_what_calls_torch_may_be_refused(compiled):
    with pytest.warns(UserWarning, match=r"called through Python, the compiler says: .*no such torch"):
        made = compiled(kernel=KERNEL, torch_calls="#error no such torch\n")
    assert take_over_calls(made) == "built without torch's headers"


def test_what_calls_torch_may_not_link(compiled):
    unknown = "int no_such_function(); int wants() { return no_such_function(); }\n"
    with pytest.warns(UserWarning, match=r"called through Python, the compiler says: .*no_such_function"):
        compiled(kernel=KERNEL, torch_calls=unknown)


def test_without_headers_nothing_is_said(compiled, monkeypatch, recwarn):
    monkeypatch.setattr(compile_units, "_has_headers", lambda _: False)
    made = compiled(kernel=KERNEL, torch_calls="#error never compiled\n", serve_it="#error nor this\n")
    assert take_over_calls(made) == "built without torch's headers"
    assert not recwarn.list


def test_other_variants_do_not_call_torch(compiled):
    compiled(calls_torch=False, kernel=KERNEL, torch_calls="#error never compiled\n")


def test_what_is_not_taken_over_is_told(compiled):
    before = count_calls("lightning_indexer")
    made = compiled(kernel=KERNEL, torch_calls=TAKES_OVER + "{ *known = 3; return 2; }\n")
    assert take_over_calls(made) == "torch took over 2 of 3 operators"
    assert count_calls("lightning_indexer") == before
