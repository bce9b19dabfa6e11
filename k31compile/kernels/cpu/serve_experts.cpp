// Calls of the mixture-of-experts operators: moe_gating_top_k and grouped_experts.
#include <cmath>
#include <vector>

#include "call_checks.h"
#include "expert_blocks.h"
#include "moe_gating_call.h"

extern "C" int64_t k31_moe_gating(k31::GatingCall* call);
extern "C" int64_t k31_grouped_experts(k31::ExpertsCall* call);

namespace k31 {
namespace {

// A projection of every expert, packed or a list of matrices, whose addresses are then gathered.
class Projection {
  public:
    // False where the matrices are not alike, have other sizes, or neither rows nor columns in a row.
    bool take(Tensors from, int64_t output, int64_t input) {
        const bool packed = from.count == 1 && from[0].dim == 3;
        const Tensor& first = from[0];
        if (!is_number(first) || (!packed && first.dim != 2)) return false;
        const int64_t *sizes = first.sizes + first.dim - 2, *strides = first.strides + first.dim - 2;
        if (sizes[0] != output || sizes[1] != input || (strides[0] != 1 && strides[1] != 1)) return false;
        experts_ = packed ? first.sizes[0] : from.count;
        matrices_ = {packed ? first.data : nullptr, nullptr, packed ? first.strides[0] : 0, strides[0], strides[1], first.kind};
        if (packed) return true;
        table_.reserve(size_t(from.count));
        for (const Tensor& x : from) {
            if (x.kind != first.kind || !has_shape(x, {output, input})) return false;
            if (x.strides[0] != strides[0] || x.strides[1] != strides[1]) return false;
            table_.push_back(x.data);
        }
        matrices_.table = table_.data();
        return true;
    }
    int64_t experts() const { return experts_; }
    const Matrices& matrices() const { return matrices_; }

  private:
    std::vector<const char*> table_;
    Matrices matrices_{};
    int64_t experts_ = 0;
};

}  // namespace

bool serve_moe_gating_top_k(Arguments& given, Results& results) {
    const Tensor& x = given.tensor();
    const int64_t count = given.integer();
    const Tensor* bias = given.tensor_or_none();
    const int64_t kept_groups = given.integer(), groups = given.integer(), two_best = given.integer();
    const double* fill = given.number_or_none();
    const bool renorm = given.flag();
    const int64_t sigmoid = given.integer();
    const double factor = given.number(), eps = given.number();
    if (!given.sound() || x.dim != 2 || !is_readable(x)) return false;
    const int64_t rows = x.sizes[0], experts = x.sizes[1];
    if (sigmoid < 0 || sigmoid > 1 || two_best < 0 || two_best > 1) return false;
    if (groups < 1 || kept_groups < 1 || kept_groups > groups || experts % groups) return false;
    if (groups > 1 && experts / groups <= two_best) return false;
    Floats32 added;
    if (count < 1 || count > experts || (bias && !has_shape(*bias, {experts})) || !added.take(bias)) return false;
    GatingCall call{};
    call.x = plane(x);
    call.bias = added.data();
    call.rows = rows;
    call.experts = experts;
    call.count = count;
    call.groups = groups;
    call.kept_groups = kept_groups;
    call.two_best = two_best;
    call.renorm = renorm;
    call.sigmoid = sigmoid;
    call.group_fill = fill ? *fill : -INFINITY;
    call.factor = factor;
    call.eps = eps;
    call.threads = given.threads();
    call.weights = reinterpret_cast<float*>(results.add(IS_FLOAT32, {rows, count}));
    call.chosen = reinterpret_cast<int32_t*>(results.add(IS_INT32, {rows, count}));
    return k31_moe_gating(&call) == OK;
}

bool serve_grouped_experts(Arguments& given, Results& results) {
    const Tensor &x = given.tensor(), &indices = given.tensor(), &weights = given.tensor();
    const Tensors gates = given.tensors(), ups = given.tensors(), downs = given.tensors();
    const bool situ = given.word_of({"swiglu", "situ"});
    const double beta = given.number();
    const double* linear_beta = given.number_or_none();
    if (!given.sound() || x.dim != 2 || !is_readable(x) || !is_number(weights)) return false;
    if (!(beta > 0) || (linear_beta && !(*linear_beta > 0))) return false;
    if ((indices.kind != IS_INT32 && indices.kind != IS_INT64) || indices.dim != 2) return false;
    const int64_t rows = x.sizes[0], width = x.sizes[1], slots = indices.sizes[1];
    if (indices.sizes[0] != rows || !has_shape(weights, {rows, slots})) return false;
    if (gates[0].dim < 2 || downs[0].dim < 2) return false;
    const int64_t inner = gates[0].sizes[gates[0].dim - 2], outputs = downs[0].sizes[downs[0].dim - 2];
    Projection gate, up, down;
    if (!gate.take(gates, inner, width) || !up.take(ups, inner, width) || !down.take(downs, outputs, inner)) return false;
    if (gate.experts() != up.experts() || gate.experts() != down.experts()) return false;
    if (gate.matrices().transposed() != up.matrices().transposed()) return false;
    ExpertsCall call{};
    call.x = plane(x);
    call.weights = plane(weights);
    call.indices = indices.data;
    call.index_bytes = indices.kind == IS_INT64 ? 8 : 4;
    call.index_stride_row = indices.strides[0];
    call.index_stride_slot = indices.strides[1];
    call.gate = gate.matrices();
    call.up = up.matrices();
    call.down = down.matrices();
    call.rows = rows;
    call.slots = slots;
    call.experts = gate.experts();
    call.width = width;
    call.inner = inner;
    call.result_width = outputs;
    call.situ = situ;
    call.beta = beta;
    call.linear_beta = linear_beta ? *linear_beta : 0;
    call.threads = given.threads();
    // The kernel adds to what is there.
    call.result = reinterpret_cast<float*>(results.add(IS_FLOAT32, {rows, outputs}));
    std::fill(call.result, call.result + rows * outputs, 0.0f);
    return k31_grouped_experts(&call) == OK;
}

}  // namespace k31
