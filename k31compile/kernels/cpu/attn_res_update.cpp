// k31::attn_res_update on the CPU (K3.1 spec 2.2, second phase): the running sum joins the prepared mixture, or the
// frozen sums by the weights that were prepared for them.
//
// A row is read three times at most, from the second time on out of the first-level cache. What is read of the frozen
// sums is more than all the rest: while a token's are mixed, the next one's are fetched.
#include <omp.h>

#include <cmath>

#include "attn_res_call.h"
#include "numbers.h"

namespace k31 {
namespace {

constexpr int ABREAST = 4;  // independent sums: one alone would wait for its own last addition
constexpr int64_t STEP = ABREAST * LANES;
constexpr int PAIRS = ABREAST / 2;  // vectors of pairs of bfloat16 in a step

// The first and the second number of each pair.
K31_INLINE Floats lower(Words pairs) { return bits<Floats>(pairs << 16); }
K31_INLINE Floats upper(Words pairs) { return bits<Floats>(pairs & 0xffff0000u); }

// A token's row of a frozen sum, what it counts, and the row that will be read after it.
struct Frozen {
    const char *row, *next;
    int64_t dtype;
    float weight;
};

struct TokenRow {
    const UpdateCall& call;
    Frozen* frozen;  // [block_count]
    int64_t token;
    const char *partial, *delta, *mixture;
    char *sum, *mixed;
    float maximum, total;

    TokenRow(const UpdateCall& c, Frozen* list, int64_t number)
        : call(c), frozen(list), token(number), partial(row_of(c.partial, token)), delta(row_of(c.delta, token)),
          mixture(row_of(c.mixture, token)), sum(c.sum + token * c.width * size_of(c.partial.dtype)),
          mixed(c.mixed + token * c.width * size_of(c.mixed_dtype)), maximum(read<float>(row_of(c.maximum, token))),
          total(read<float>(row_of(c.total, token))) {}

    // LANES numbers; the row's end lies beyond them if WHOLE.
    template <bool WHOLE> K31_INLINE Floats at(const char* row, int64_t dtype, int64_t i) const {
        return numbers_at(row, dtype, i, WHOLE ? i + LANES : call.width);
    }

    template <bool WHOLE> K31_INLINE void put(char* row, int64_t dtype, int64_t i, Floats x) const {
        put_numbers(row, dtype, i, WHOLE ? i + LANES : call.width, x);
    }

    // Numbers of the new running sum, in the dtype in which it is kept.
    template <bool WHOLE> K31_INLINE Floats add_at(int64_t i) const {
        const int64_t dtype = call.partial.dtype;
        Floats p = at<WHOLE>(partial, dtype, i);
        if (delta) {
            Floats d = at<WHOLE>(delta, call.delta.dtype, i);
            if (call.delta.dtype != dtype) d = rounded(d, dtype);
            p = rounded(p + d, dtype);
        }
        put<WHOLE>(sum, dtype, i, p);
        return p;
    }

    // The same where both terms are bfloat16: rounded once.
    K31_INLINE Floats add_halves_at(int64_t i) const {
        const Words p = narrow_words(at<true>(partial, BFLOAT16, i) + at<true>(delta, BFLOAT16, i));
        store(sum + i * 2, drop_upper(p));
        return bits<Floats>(p << 16);
    }

    // Store the new running sum and return its logit.
    float add() const {
        const bool halves = delta && call.partial.dtype == BFLOAT16 && call.delta.dtype == BFLOAT16;
        const Operand& query = call.query;
        Floats dots[ABREAST] = {}, squares[ABREAST] = {};
        const auto take = [&](int k, Floats p, Floats q) K31_BODY {
            dots[k] += p * q;
            squares[k] += p * p;
        };
        const auto whole = [&](int64_t i, auto number) K31_BODY {
            if (query.dtype == FLOAT32)
#pragma GCC unroll 4
                for (int k = 0; k < ABREAST; k++)
                    take(k, number(i + k * LANES), at<true>(query.data, FLOAT32, i + k * LANES));
            else
#pragma GCC unroll 4
                for (int k = 0; k < ABREAST; k++)
                    take(k, number(i + k * LANES), at<true>(query.data, BFLOAT16, i + k * LANES));
        };
        int64_t i = 0;
        if (halves)
            for (; i + STEP <= call.width; i += STEP) whole(i, [&](int64_t n) { return add_halves_at(n); });
        else
            for (; i + STEP <= call.width; i += STEP) whole(i, [&](int64_t n) { return add_at<true>(n); });
        for (int k = 0; i < call.width; i += LANES, k++)
            take(k, add_at<false>(i), at<false>(query.data, query.dtype, i));
        const float dot = sum_lanes((dots[0] + dots[1]) + (dots[2] + dots[3]));
        const float square = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
        return dot * inverse_rms(square, call.width, float(call.eps));
    }

    // The frozen sums that count, with their weights times `scale`; a weight of zero says that one is not to be read.
    int64_t list_frozen(float scale) const {
        int64_t count = 0;
        const bool is_last = token + 1 == call.tokens;
        for (int64_t n = 0; n < call.block_count; n++) {
            const float weight = read<float>(mixture + n * 4) * scale;
            if (weight == 0) continue;
            const Operand& block = call.blocks[n];
            frozen[count++] = {row_of(block, token), is_last ? nullptr : row_of(block, token + 1), block.dtype, weight};
        }
        return count;
    }

    template <bool WHOLE> K31_INLINE void add_frozen(Floats (&h)[ABREAST], int64_t i, int64_t count) const {
        for (int64_t n = 0; n < count; n++) {
            const Frozen& one = frozen[n];
            if (one.next && WHOLE) prefetch_far(one.next + i * size_of(one.dtype), STEP * size_of(one.dtype));
            if (one.dtype == FLOAT32)
#pragma GCC unroll 4
                for (int k = 0; k < ABREAST; k++) h[k] += one.weight * at<WHOLE>(one.row, FLOAT32, i + k * LANES);
            else
#pragma GCC unroll 4
                for (int k = 0; k < ABREAST; k++) h[k] += one.weight * at<WHOLE>(one.row, BFLOAT16, i + k * LANES);
        }
    }

    template <bool WHOLE>
    K31_INLINE void mix_step(int64_t i, float prepared, float own, int64_t count, SumOfSquares& squares) const {
        Floats h[ABREAST];
#pragma GCC unroll 4
        for (int k = 0; k < ABREAST; k++) h[k] = at<WHOLE>(sum, call.partial.dtype, i + k * LANES) * own;
        if (call.blocks) add_frozen<WHOLE>(h, i, count);
        else
#pragma GCC unroll 4
            for (int k = 0; k < ABREAST; k++) h[k] += at<WHOLE>(mixture, FLOAT32, i + k * LANES) * prepared;
#pragma GCC unroll 4
        for (int k = 0; k < ABREAST; k++) {
            const int64_t place = i + k * LANES;
            h[k] = rounded(h[k], call.mixed_dtype);
            put<WHOLE>(mixed, call.mixed_dtype, place, h[k]);
            if (call.norm_weight.data) squares.add(h[k]);
        }
    }

    // The same where running sum, frozen sums and result are bfloat16: two numbers of a word at a time.
    K31_INLINE void mix_pairs(int64_t i, float own, int64_t count, SumOfSquares& squares) const {
        Floats even[PAIRS], odd[PAIRS];
#pragma GCC unroll 2
        for (int k = 0; k < PAIRS; k++) {
            const Words pair = load<Words>(sum + i * 2 + k * int64_t(sizeof(Words)));
            even[k] = lower(pair) * own;
            odd[k] = upper(pair) * own;
        }
        for (int64_t n = 0; n < count; n++) {
            const char* const row = frozen[n].row + i * 2;
            const float weight = frozen[n].weight;
            if (frozen[n].next) prefetch_far(frozen[n].next + i * 2, STEP * 2);
#pragma GCC unroll 2
            for (int k = 0; k < PAIRS; k++) {
                const Words pair = load<Words>(row + k * int64_t(sizeof(Words)));
                even[k] += lower(pair) * weight;
                odd[k] += upper(pair) * weight;
            }
        }
#pragma GCC unroll 2
        for (int k = 0; k < PAIRS; k++) {
            const Words low = narrow_words(even[k]), high = narrow_words(odd[k]) << 16;
            store(mixed + i * 2 + k * int64_t(sizeof(Words)), low | high);
            if (!call.norm_weight.data) continue;
            squares.add(bits<Floats>(low << 16));
            squares.add(bits<Floats>(high));
        }
    }

    // Whether all that is mixed, and the mixture, is bfloat16.
    bool is_paired(int64_t count) const {
        bool paired = call.blocks && call.partial.dtype == BFLOAT16 && call.mixed_dtype == BFLOAT16;
        for (int64_t n = 0; n < count; n++) paired = paired && frozen[n].dtype == BFLOAT16;
        return paired;
    }

    // Store the mixture with the running sum of the given logit, and return the sum of its squares if a norm needs it.
    double mix(float logit) const {
        const float top = maximum > logit ? maximum : logit;
        const float before = std::exp(maximum - top), own = std::exp(logit - top);
        const float shared = before * total + own, a = before / shared, b = own / shared;
        const int64_t count = call.blocks ? list_frozen(a) : 0;
        SumOfSquares squares;
        int64_t i = 0;
        if (is_paired(count))
            for (; i + STEP <= call.width; i += STEP) mix_pairs(i, b, count, squares);
        for (; i + STEP <= call.width; i += STEP) mix_step<true>(i, a, b, count, squares);
        if (i < call.width) mix_step<false>(i, a, b, count, squares);
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

int64_t update(const UpdateCall& call) {
    const double operations = 6 + 2 * double(call.block_count);  // of a number
    const int64_t threads = threads_for(operations * double(call.tokens) * double(call.width), call.threads);
    Carver measure(nullptr);
    measure.take<Frozen>(call.block_count);
    const Scratch scratch(std::max<int64_t>(measure.used() * threads, 1));
    if (!scratch) return NO_MEMORY;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t token = 0; token < call.tokens; token++) {
        Carver carver(scratch.base() + omp_get_thread_num() * measure.used());
        TokenRow(call, carver.take<Frozen>(call.block_count), token).run();
    }
    return OK;
}

}  // namespace
}  // namespace k31

K31_EXPORT int64_t k31_attn_res_update_size() { return sizeof(k31::UpdateCall); }

K31_EXPORT int64_t k31_attn_res_update(k31::UpdateCall* call) { return k31::update(*call); }
