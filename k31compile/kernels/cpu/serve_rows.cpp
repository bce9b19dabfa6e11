// Calls of short_conv, gated_rms_norm and mega_kda, which goes through both.
#include "call_checks.h"
#include "gated_rms_norm.h"
#include "mega_kda_call.h"
#include "short_conv.h"

extern "C" int64_t k31_short_conv(k31::ConvCall* call);
extern "C" int64_t k31_gated_rms_norm(k31::NormCall* call);
extern "C" int64_t k31_mega_kda(k31::MegaCall* call);

namespace k31 {
namespace {

constexpr int64_t MOST_TAPS = 64;                      // as in cpu/short_conv.py
constexpr int64_t SIGMOID_GATE = 1, SILU = 2, BETWEEN = 2;  // as in calls.py

// How a gated norm is written: its words as calls.py numbers them.
struct NormWords {
    int64_t activation, gate_first, weight_cast;

    static NormWords read(Arguments& given) {
        const int64_t activation = given.word_of({"sigmoid", "silu"}) ? SILU : SIGMOID_GATE;
        const int64_t gate_first = !given.flag();
        return {activation, gate_first, given.word_of({"before", "after", "between"})};
    }
    bool fit() const { return weight_cast != BETWEEN || !gate_first; }
};

// Query, key and value channels, of a tensor each or side by side in one along a dimension.
void take_streams(Tensors from, int64_t dim, const int64_t (&channels)[STREAMS], Operand (&to)[STREAMS]) {
    int64_t first = 0;
    for (int i = 0; i < STREAMS; i++) {
        const Tensor& x = from[from.count == 1 ? 0 : i];
        const int64_t outer = x.dim == 3 ? x.strides[0] : 0;
        to[i] = {x.data, x.kind, outer, x.strides[x.dim - 2], x.strides[x.dim - 1]};
        if (from.count != 1) continue;
        to[i].data += first * x.strides[dim] * size_of(x.kind);
        first += channels[i];
    }
}

// Whether tensors have these sizes, the channels of one or of three at place `dim`, and hold numbers.
bool are_streams(Tensors from, std::initializer_list<int64_t> sizes, int64_t dim, const int64_t (&channels)[STREAMS]) {
    for (int64_t i = 0; i < from.count; i++) {
        const Tensor& x = from[i];
        if (!is_number(x) || x.dim != int64_t(sizes.size())) return false;
        const int64_t own = from.count == 1 ? channels[0] + channels[1] + channels[2] : channels[i];
        for (int64_t d = 0; d < x.dim; d++)
            if (x.sizes[d] != (d == dim ? own : sizes.begin()[d])) return false;
    }
    return true;
}

bool have_one_kind(Tensors tensors) {
    for (const Tensor& x : tensors)
        if (x.kind != tensors[0].kind) return false;
    return true;
}

}  // namespace

bool serve_short_conv(Arguments& given, Results& results) {
    const Tensor &x = given.tensor(), &weight = given.tensor();
    const Tensor *bias = given.tensor_or_none(), *state = given.tensor_or_none(), *valid = given.tensor_or_none();
    const int64_t activation = given.word_of({"none", "silu"}) ? SILU : 0;
    if (!given.sound() || x.dim != 3 || weight.dim != 2 || !is_number(x) || !is_number(weight)) return false;
    const int64_t batch = x.sizes[0], tokens = x.sizes[1], channels = x.sizes[2], taps = weight.sizes[1];
    if (taps < 2 || taps > MOST_TAPS || weight.sizes[0] != channels) return false;
    if (bias && (!is_number(*bias) || !has_shape(*bias, {channels}))) return false;
    if (state && (!is_number(*state) || !has_shape(*state, {batch, taps - 1, channels}))) return false;
    Integers lengths;
    if (valid && (!has_shape(*valid, {batch}) || !lengths.take(*valid))) return false;
    ConvCall call{};
    call.x = operand(x);
    call.weight = {weight.data, weight.kind, 0, weight.strides[0], weight.strides[1]};
    if (bias) call.bias = number_operand(*bias);
    if (state) call.state = operand(*state);
    call.lengths = lengths.data();
    call.batch = batch;
    call.tokens = tokens;
    call.channels = channels;
    call.taps = taps;
    call.activation = activation;
    call.threads = given.threads();
    call.state_dtype = state ? state->kind : x.kind;
    call.result = results.add(x.kind, {batch, tokens, channels});
    call.new_state = results.add(call.state_dtype, {batch, taps - 1, channels});
    return k31_short_conv(&call) == OK;
}

bool serve_gated_rms_norm(Arguments& given, Results& results) {
    const Tensor &x = given.tensor(), &gate = given.tensor(), &weight = given.tensor();
    const double eps = given.number();
    const NormWords words = NormWords::read(given);
    const int64_t result_dtype = given.dtype_or(x.kind);
    if (!given.sound() || !words.fit() || x.dim < 1 || x.dim > 4) return false;
    if (!is_readable(x) || !is_readable(gate) || !is_readable(weight)) return false;
    if (gate.dim != x.dim || !std::equal(x.sizes, x.sizes + x.dim, gate.sizes)) return false;
    if (weight.dim > 2 || weight.dim > x.dim) return false;
    if (!std::equal(weight.sizes, weight.sizes + weight.dim, x.sizes + x.dim - weight.dim)) return false;
    int64_t sizes[4] = {1, 1, 1, 1};
    std::copy(x.sizes, x.sizes + x.dim, sizes + 4 - x.dim);
    NormCall call{};
    call.x = row_operand(x);
    call.gate = row_operand(gate);
    call.weight = row_operand(weight);
    call.outer = sizes[0];
    call.rows = sizes[1];
    call.heads = sizes[2];
    call.width = sizes[3];
    call.activation = words.activation;
    call.gate_first = words.gate_first;
    call.weight_cast = words.weight_cast;
    call.eps = eps;
    call.threads = given.threads();
    call.result = results.add(result_dtype, x.sizes, x.dim);
    call.result_dtype = result_dtype;
    return k31_gated_rms_norm(&call) == OK;
}

namespace {

bool serve_mega(Arguments& given, Results& results, bool in_place) {
    const Tensors x = given.tensors(), weight = given.tensors(), before = given.tensors_or_none();
    const Tensor &raw_gate = given.tensor(), &a_log = given.tensor();
    const Tensor* dt_bias = given.tensor_or_none();
    const Tensor &raw_beta = given.tensor(), &state = given.tensor(), &out_gate = given.tensor();
    const Tensor& norm_weight = given.tensor();
    const Tensor* pool_rows = in_place ? given.tensor_or_none() : nullptr;
    MegaCall call{};
    call.norm_eps = given.number();
    const double* const lower_bound = given.number_or_none();
    call.l2_eps = given.number();
    call.beta_factor = given.number();
    call.scale = given.number();
    call.value_first = given.word_of({"KV", "VK"});
    call.beta_dtype = given.dtype_or(IS_FLOAT32);
    const int64_t core_dtype = given.dtype_or(IS_FLOAT32);
    const NormWords words = NormWords::read(given);
    call.result_dtype = given.dtype_or(core_dtype);
    if (!given.sound() || !words.fit() || (x.count != 1 && x.count != STREAMS) || weight.count != x.count) return false;
    if ((before.count && before.count != x.count) || raw_gate.dim != 4 || out_gate.dim != 4 || weight[0].dim != 2)
        return false;
    const int64_t batch = raw_gate.sizes[0], tokens = raw_gate.sizes[1], heads = raw_gate.sizes[2];
    const int64_t width = raw_gate.sizes[3], depth = out_gate.sizes[3], taps = weight[0].sizes[1];
    const int64_t channels[STREAMS] = {heads * width, heads * width, heads * depth};
    if (lower_bound && !(*lower_bound <= 0)) return false;
    if (taps < 2 || taps > MOST_TAPS || !fits_scratch(width, depth)) return false;
    if (!are_streams(x, {batch, tokens, 0}, 2, channels) || !are_streams(weight, {0, taps}, 0, channels)) return false;
    if (!are_streams(before, {batch, taps - 1, 0}, 2, channels) || !have_one_kind(x) || !have_one_kind(before))
        return false;
    const int64_t rows = call.value_first ? depth : width, numbers = call.value_first ? width : depth;
    if (!is_readable(raw_gate) || !is_number(a_log) || !is_number(raw_beta) || !is_readable(state)) return false;
    if (!is_readable(out_gate) || !is_readable(norm_weight)) return false;
    if (!has_shape(a_log, {heads}) || !has_shape(raw_beta, {batch, tokens, heads})) return false;
    if (dt_bias && (!is_readable(*dt_bias) || !has_shape(*dt_bias, {heads, width}))) return false;
    Places places;
    const int64_t states = pool_rows && state.dim > 0 ? state.sizes[0] : batch;
    if (!has_shape(state, {states, heads, rows, numbers}) || !has_shape(out_gate, {batch, tokens, heads, depth}))
        return false;
    if (in_place && (!is_writable(state) || !places.take(pool_rows, batch, states))) return false;
    if (!has_shape(norm_weight, {depth}) && !has_shape(norm_weight, {heads, depth})) return false;
    take_streams(x, 2, channels, call.x);
    take_streams(weight, 0, channels, call.weight);
    if (before.count) take_streams(before, 2, channels, call.conv_state);
    call.raw_gate = operand(raw_gate);
    call.a_log = number_operand(a_log);
    if (dt_bias) call.dt_bias = row_operand(*dt_bias);
    call.raw_beta = operand(raw_beta);
    call.state = {state.data, state.kind, state.strides[0], state.strides[2], state.strides[1]};
    call.out_gate = operand(out_gate);
    call.norm_weight = row_operand(norm_weight);
    call.batch = batch;
    call.tokens = tokens;
    call.heads = heads;
    call.width = width;
    call.depth = depth;
    call.taps = taps;
    call.softplus = lower_bound == nullptr;
    call.core_dtype = core_dtype;
    call.activation = words.activation;
    call.gate_first = words.gate_first;
    call.weight_cast = words.weight_cast;
    call.lower_bound = lower_bound ? *lower_bound : 0;
    call.threads = given.threads();
    call.conv_dtype = before.count ? before[0].kind : x[0].kind;
    call.result = results.add(call.result_dtype, {batch, tokens, heads, depth});
    call.new_conv = results.add(call.conv_dtype, {batch, taps - 1, call.channels()});
    if (!in_place) call.last = reinterpret_cast<float*>(results.add(IS_FLOAT32, {batch, heads, rows, numbers}));
    call.places = places.places();
    return k31_mega_kda(&call) == OK;
}

}  // namespace

bool serve_mega_kda(Arguments& given, Results& results) { return serve_mega(given, results, false); }
bool serve_mega_kda_in_place(Arguments& given, Results& results) { return serve_mega(given, results, true); }

}  // namespace k31
