// Rows of numbers in either dtype, a vector at a time. What lies beyond the end of a row reads as zeros and is never
// written, so a number's result does not depend on where it stands in its row.
#pragma once
#include <algorithm>

#include "tile.h"

namespace k31 {

constexpr double WORTH_A_THREAD_OF_ROWS = 1e6;  // operations below which waking a thread costs more than it saves

K31_INLINE int64_t threads_for(double work, int64_t threads) {
    return work < WORTH_A_THREAD_OF_ROWS ? 1 : std::max<int64_t>(threads, 1);
}

// Round to bfloat16, ties to even, left in the low halves; a NaN stays one.
K31_INLINE Words narrow_words(Floats x) { return x == x ? narrow_finite(x) : bits<Words>(x) >> 16 | 0x40; }

K31_INLINE Halves drop_upper(Words words) {
#if defined(__AVX512F__) && K31_LANES == 16
    return bits<Halves>(_mm512_cvtepi32_epi16(bits<__m512i>(words)));  // spelled out, as `widen` is
#else
    return __builtin_convertvector(words, Halves);
#endif
}

K31_INLINE Halves narrow(Floats x) { return drop_upper(narrow_words(x)); }

// The value that a number has once it is stored in a dtype.
K31_INLINE Floats rounded(Floats x, int64_t dtype) {
    return dtype == FLOAT32 ? x : bits<Floats>(narrow_words(x) << 16);
}

K31_INLINE Floats numbers_at(const char* row, int64_t dtype, int64_t i, int64_t width) {
    const int64_t left = width - i;
    if (left >= LANES) return dtype == FLOAT32 ? load<Floats>(row + i * 4) : widen(load<Halves>(row + i * 2));
    Floats whole{};
    Halves half{};
    if (left <= 0) return whole;
    if (dtype == FLOAT32) {
        std::memcpy(&whole, row + i * 4, size_t(left) * 4);
        return whole;
    }
    std::memcpy(&half, row + i * 2, size_t(left) * 2);
    return widen(half);
}

K31_INLINE void put_numbers(char* row, int64_t dtype, int64_t i, int64_t width, Floats x) {
    const int64_t left = width - i;
    if (left >= LANES) {
        if (dtype == FLOAT32) store(row + i * 4, x);
        else store(row + i * 2, narrow(x));
    } else if (left > 0) {
        const Halves half = narrow(x);
        if (dtype == FLOAT32) std::memcpy(row + i * 4, &x, size_t(left) * 4);
        else std::memcpy(row + i * 2, &half, size_t(left) * 2);
    }
}

typedef float HalfFloats __attribute__((vector_size(LANES * 2)));
typedef double Doubles __attribute__((vector_size(LANES * 4)));

// In double, where the square of a float is exact: the sum is right to the last bit of a float in any order.
struct SumOfSquares {
    Doubles low{}, high{};

    K31_INLINE void add(Floats x) {
        HalfFloats halves[2];
        std::memcpy(halves, &x, sizeof x);
        const Doubles a = __builtin_convertvector(halves[0], Doubles), b = __builtin_convertvector(halves[1], Doubles);
        low += a * a;
        high += b * b;
    }
    K31_INLINE double total() const {
        const Doubles both = low + high;
        double sum = 0;
        for (int i = 0; i < LANES / 2; i++) sum += both[i];
        return sum;
    }
};

// 1 / sqrt(mean + eps) with the roundings of torch: mean, sum and root are floats.
K31_INLINE float inverse_rms(double squares, int64_t width, float eps) {
    return 1.0f / __builtin_sqrtf(float(squares) / float(width) + eps);
}

}  // namespace k31
