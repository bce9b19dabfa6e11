// k31::gated_rms_norm on the CPU (K3.1 spec 2.3, 3.8): two passes over a row that stays in the first-level cache.
#include <omp.h>

#include "activation.h"
#include "gated_rms_norm.h"
#include "numbers.h"

namespace k31 {

enum WeightCast : int64_t { BEFORE = 0, AFTER = 1, BETWEEN = 2 };

// A variant is known when it is compiled: choosing among them anew for each vector would cost as much as the gate.
template <int64_t ACTIVATION, bool GATE_FIRST, int64_t WEIGHT_CAST> struct GatedRow {
    const NormCall& call;
    const char *x, *gate, *weight;
    char* result;

    GatedRow(const NormCall& c, int64_t number) : call(c) {
        const int64_t head = number % c.heads, row = number / c.heads % c.rows, outer = number / c.heads / c.rows;
        x = row_of(c.x, outer, row, head);
        gate = row_of(c.gate, outer, row, head);
        weight = row_of(c.weight, outer, row, head);
        result = c.result + number * c.width * size_of(c.result_dtype);
    }

    K31_INLINE Floats gate_at(int64_t i) const {
        return activated(ACTIVATION, numbers_at(gate, call.gate.dtype, i, call.width));
    }

    // What is normalised: x, or the gated x.
    K31_INLINE Floats value_at(int64_t i) const {
        const Floats value = numbers_at(x, call.x.dtype, i, call.width);
        return GATE_FIRST ? value * gate_at(i) : value;
    }

    float inverse() const {
        SumOfSquares squares;
        for (int64_t i = 0; i < call.width; i += LANES) squares.add(value_at(i));
        return inverse_rms(squares.total(), call.width, float(call.eps));
    }

    // Products only: no addition that a compiler could fuse, so the roundings are those of the definition.
    K31_INLINE Floats finish(Floats normed, int64_t i) const {
        const Floats scale = numbers_at(weight, call.weight.dtype, i, call.width);
        const Floats gate = GATE_FIRST ? splat(1.0f) : gate_at(i);
        const int64_t dtype = call.x.dtype;
        if (WEIGHT_CAST == BEFORE) return normed * scale * gate;
        if (WEIGHT_CAST == BETWEEN) return rounded(rounded(normed * scale, dtype) * rounded(gate, dtype), dtype);
        const int64_t promoted = call.weight.dtype == BFLOAT16 ? dtype : int64_t(FLOAT32);
        return rounded(rounded(normed, dtype) * scale, promoted) * gate;
    }

    void run() const {
        const float factor = inverse();
        for (int64_t i = 0; i < call.width; i += LANES)
            put_numbers(result, call.result_dtype, i, call.width, finish(value_at(i) * factor, i));
    }
};

// `Body<activation, gate first, weight cast>::run` for the variant of a call.
template <template <int64_t, bool, int64_t> class Body, int64_t ACTIVATION> auto variant_with(const NormCall& call) {
    if (call.weight_cast == BETWEEN) return Body<ACTIVATION, false, BETWEEN>::run;
    if (call.weight_cast == AFTER)
        return call.gate_first ? Body<ACTIVATION, true, AFTER>::run : Body<ACTIVATION, false, AFTER>::run;
    return call.gate_first ? Body<ACTIVATION, true, BEFORE>::run : Body<ACTIVATION, false, BEFORE>::run;
}

template <template <int64_t, bool, int64_t> class Body> auto variant_of(const NormCall& call) {
    return call.activation == SILU ? variant_with<Body, SILU>(call) : variant_with<Body, SIGMOID>(call);
}

template <int64_t ACTIVATION, bool GATE_FIRST, int64_t WEIGHT_CAST> struct OverRows {
    static void run(const NormCall& call, int64_t rows, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t number = 0; number < rows; number++)
            GatedRow<ACTIVATION, GATE_FIRST, WEIGHT_CAST>(call, number).run();
    }
};

template <int64_t ACTIVATION, bool GATE_FIRST, int64_t WEIGHT_CAST> struct OneRow {
    static void run(const NormCall& call) { GatedRow<ACTIVATION, GATE_FIRST, WEIGHT_CAST>(call, 0).run(); }
};

void norm_one_row(const NormCall& call) { variant_of<OneRow>(call)(call); }

}  // namespace k31

K31_EXPORT int64_t k31_gated_rms_norm_size() { return sizeof(k31::NormCall); }

K31_EXPORT int64_t k31_gated_rms_norm(k31::NormCall* call) {
    constexpr double OPERATIONS = 16;  // of a number, most of them in the gate
    const int64_t rows = call->outer * call->rows * call->heads;
    const int64_t threads = k31::threads_for(OPERATIONS * double(rows) * double(call->width), call->threads);
    k31::variant_of<k31::OverRows>(*call)(*call, rows, threads);
    return k31::OK;
}
