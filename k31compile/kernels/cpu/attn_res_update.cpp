// k31::attn_res_update on the CPU (K3.1 spec 2.2, second phase): the running sum joins the prepared mixture.
//
// A row is read three times at most, from the second time on out of the first-level cache; nothing is kept beside it.
#include <omp.h>

#include <cmath>

#include "attn_res_call.h"
#include "numbers.h"

namespace k31 {

constexpr int ABREAST = 4;  // independent sums: one alone would wait for its own last addition

struct TokenRow {
    const UpdateCall& call;
    const char *partial, *delta, *mixture;
    char *sum, *mixed;
    float maximum, total;

    TokenRow(const UpdateCall& c, int64_t token)
        : call(c), partial(row(c.partial, token)), delta(row(c.delta, token)), mixture(row(c.mixture, token)),
          sum(c.sum + token * c.width * size_of(c.partial.dtype)),
          mixed(c.mixed + token * c.width * size_of(c.mixed_dtype)), maximum(read<float>(row(c.maximum, token))),
          total(read<float>(row(c.total, token))) {}

    static const char* row(const Operand& from, int64_t token) {
        return from.data ? from.data + token * from.stride_head * size_of(from.dtype) : nullptr;
    }

    K31_INLINE Floats delta_at(int64_t i) const {
        const Floats d = numbers_at(delta, call.delta.dtype, i, call.width);
        return call.delta.dtype == call.partial.dtype ? d : rounded(d, call.partial.dtype);
    }

    // Store the new running sum, in the dtype in which it is kept, and return its logit.
    float add() const {
        const int64_t dtype = call.partial.dtype;
        Floats dots[ABREAST] = {};
        SumOfSquares squares;
        for (int64_t i = 0; i < call.width; i += ABREAST * LANES)
#pragma GCC unroll 4
            for (int k = 0; k < ABREAST; k++) {
                const int64_t at = i + k * LANES;
                Floats p = numbers_at(partial, dtype, at, call.width);
                if (delta) p = rounded(p + delta_at(at), dtype);
                put_numbers(sum, dtype, at, call.width, p);
                dots[k] += p * numbers_at(call.query.data, FLOAT32, at, call.width);
                squares.add(p);
            }
        const float dot = sum_lanes((dots[0] + dots[1]) + (dots[2] + dots[3]));
        return dot * inverse_rms(squares.total(), call.width, float(call.eps));
    }

    // Store the mixture with the running sum of the given logit, and return the sum of its squares if a norm needs it.
    double mix(float logit) const {
        const float top = maximum > logit ? maximum : logit;
        const float before = std::exp(maximum - top), own = std::exp(logit - top);
        const float shared = before * total + own, a = before / shared, b = own / shared;
        SumOfSquares squares;
        for (int64_t i = 0; i < call.width; i += LANES) {
            Floats h = numbers_at(mixture, FLOAT32, i, call.width) * a +
                       numbers_at(sum, call.partial.dtype, i, call.width) * b;
            h = rounded(h, call.mixed_dtype);
            put_numbers(mixed, call.mixed_dtype, i, call.width, h);
            if (call.norm_weight.data) squares.add(h);
        }
        return squares.total();
    }

    void normalise(double squares) const {
        const float factor = inverse_rms(squares, call.width, float(call.norm_eps));
        for (int64_t i = 0; i < call.width; i += LANES) {
            const Floats weight = numbers_at(call.norm_weight.data, call.norm_weight.dtype, i, call.width);
            const Floats h = numbers_at(mixed, call.mixed_dtype, i, call.width);
            put_numbers(mixed, call.mixed_dtype, i, call.width, h * factor * weight);
        }
    }

    void run() const {
        const double squares = mix(add());
        if (call.norm_weight.data) normalise(squares);
    }
};

}  // namespace k31

K31_EXPORT int64_t k31_attn_res_update_size() { return sizeof(k31::UpdateCall); }

K31_EXPORT int64_t k31_attn_res_update(k31::UpdateCall* call) {
    constexpr double OPERATIONS = 6;  // of a number
    const int64_t threads = k31::threads_for(OPERATIONS * double(call->tokens) * double(call->width), call->threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t token = 0; token < call->tokens; token++) k31::TokenRow(*call, token).run();
    return k31::OK;
}
