// Calls of the delta-rule operators: with a decay per key channel, or one for a whole head.
#include "call_checks.h"
#include "delta_call.h"

extern "C" int64_t k31_delta_rule(k31::DeltaCall* call);

namespace k31 {
namespace {

struct Form {
    bool scalar_gate, by_chunk, in_place;
};

// Limits of sequences: they ascend from 0 to the number of tokens.
bool are_limits(const int64_t* limits, int64_t count, int64_t tokens) {
    return limits[0] == 0 && limits[count - 1] == tokens && std::is_sorted(limits, limits + count);
}

bool serve_delta(Form form, Arguments& given, Results& results) {
    const Tensor &query = given.tensor(), &key = given.tensor(), &value = given.tensor();
    const Tensor &gate = given.tensor(), &beta = given.tensor();
    const Tensor* state = form.by_chunk ? given.tensor_or_none() : &given.tensor();
    const Tensor* sequences = form.by_chunk ? given.tensor_or_none() : nullptr;
    const Tensor* pool_rows = form.in_place ? given.tensor_or_none() : nullptr;
    const double scale = given.number();
    const bool value_first = given.word_of({"KV", "VK"});
    if (!given.sound() || query.dim != 4 || value.dim != 4) return false;
    const int64_t batch = query.sizes[0], tokens = query.sizes[1], heads = query.sizes[2];
    const int64_t width = query.sizes[3], depth = value.sizes[3];
    if (!fits_scratch(width, depth)) return false;
    if (!is_readable(query) || !is_readable(key) || !is_readable(value) || !is_number(beta)) return false;
    if (!has_shape(key, {batch, tokens, heads, width}) || !has_shape(value, {batch, tokens, heads, depth})) return false;
    if (!has_shape(beta, {batch, tokens, heads})) return false;
    bool scalar_gate = form.scalar_gate;
    if (scalar_gate) {
        if (!is_number(gate) || !has_shape(gate, {batch, tokens, heads})) return false;
    } else {
        if (!has_shape(gate, {batch, tokens, heads, width})) return false;
        scalar_gate = gate.strides[3] == 0;
        if (scalar_gate ? !is_number(gate) : !is_readable(gate)) return false;
    }
    Integers limits;
    int64_t strands = batch;
    if (sequences) {
        if (batch != 1 || sequences->dim != 1 || !limits.take(*sequences)) return false;
        if (!are_limits(limits.data(), sequences->sizes[0], tokens)) return false;
        strands = sequences->sizes[0] - 1;
        if (strands == 0) return false;
    }
    const int64_t rows = value_first ? depth : width, numbers = value_first ? width : depth;
    Places places;
    const int64_t states = pool_rows && state->dim > 0 ? state->sizes[0] : strands;
    if (state && (!is_readable(*state) || !has_shape(*state, {states, heads, rows, numbers}))) return false;
    if (form.in_place && (!is_writable(*state) || !places.take(pool_rows, strands, states))) return false;
    DeltaCall call{};
    call.query = operand(query);
    call.key = operand(key);
    call.value = operand(value);
    call.gate = operand(gate);
    call.beta = operand(beta);
    if (state) call.state = {state->data, state->kind, state->strides[0], state->strides[2], state->strides[1]};
    call.limits = limits.data();
    call.sequences = strands;
    call.tokens = tokens;
    call.heads = heads;
    call.width = width;
    call.depth = depth;
    call.scalar_gate = scalar_gate;
    call.value_first = value_first;
    call.by_chunk = form.by_chunk;
    call.scale = scale;
    call.threads = given.threads();
    call.output = reinterpret_cast<float*>(results.add(IS_FLOAT32, {batch, tokens, heads, depth}));
    if (!form.in_place) call.last = reinterpret_cast<float*>(results.add(IS_FLOAT32, {strands, heads, rows, numbers}));
    call.places = places.places();
    return k31_delta_rule(&call) == OK;
}

}  // namespace

bool serve_kda_recurrent(Arguments& given, Results& results) {
    return serve_delta({false, false, false}, given, results);
}
bool serve_kda_recurrent_in_place(Arguments& given, Results& results) {
    return serve_delta({false, false, true}, given, results);
}
bool serve_kda_chunk(Arguments& given, Results& results) { return serve_delta({false, true, false}, given, results); }
bool serve_gated_delta_recurrent(Arguments& given, Results& results) {
    return serve_delta({true, false, false}, given, results);
}
bool serve_gated_delta_chunk(Arguments& given, Results& results) {
    return serve_delta({true, true, false}, given, results);
}

}  // namespace k31
