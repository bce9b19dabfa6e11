// Calls of skinny_linear.
#include "call_checks.h"
#include "skinny_linear_call.h"

extern "C" int64_t k31_skinny_linear(k31::SkinnyCall* call);

namespace k31 {
namespace {

// Whether a tensor's rows lie at one distance from each other, and how many there are of what width.
bool has_even_rows(const Tensor& x, Operand& to, int64_t& rows) {
    rows = 1;
    to = {x.data, x.kind, 0, 0, 0};
    for (int64_t d = x.dim - 2; d >= 0; d--) {
        if (x.sizes[d] == 1) continue;
        if (rows == 1) to.stride_outer = x.strides[d];
        else if (x.strides[d] != to.stride_outer * rows) return false;
        rows *= x.sizes[d];
    }
    return true;
}

}  // namespace

bool serve_skinny_linear(Arguments& given, Results& results) {
    constexpr int64_t MOST_DIMENSIONS = 4;
    const Tensor &x = given.tensor(), &weight = given.tensor();
    const Tensor* bias = given.tensor_or_none();
    if (!given.sound() || x.dim < 1 || x.dim > MOST_DIMENSIONS || weight.dim != 2) return false;
    if (!is_number(x) || weight.kind != x.kind || !is_readable(x) || !is_readable(weight)) return false;
    SkinnyCall call{};
    if (!has_even_rows(x, call.x, call.rows) || weight.sizes[1] != x.last()) return false;
    call.weight = plane(weight);
    call.outputs = weight.sizes[0];
    call.depth = x.last();
    if (bias) {
        if (!is_number(*bias) || !has_shape(*bias, {call.outputs})) return false;
        call.bias = number_operand(*bias);
    }
    call.threads = given.threads();
    int64_t sizes[MOST_DIMENSIONS];
    std::copy(x.sizes, x.sizes + x.dim - 1, sizes);
    sizes[x.dim - 1] = call.outputs;
    call.result = results.add(x.kind, sizes, x.dim);
    return k31_skinny_linear(&call) == OK;
}

}  // namespace k31
