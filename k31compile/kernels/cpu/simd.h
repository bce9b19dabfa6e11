// Vectors of LANES 32-bit elements, written with GCC/Clang vector extensions: one source for AVX-512, AVX2 and
// plain SSE or NEON. A vector wider than the machine's is legal (the compiler splits it), so K31_LANES lets any
// machine run the code of any other; K31_PAIRS does the same for the bf16-pair arithmetic.
#pragma once
#include <cstdint>
#include <cstring>

#if !defined(K31_LANES)
#if defined(__AVX512F__)
#define K31_LANES 16
#elif defined(__AVX2__)
#define K31_LANES 8
#else
#define K31_LANES 4
#endif
#endif

#if defined(__AVX512BF16__) && K31_LANES == 16
#define K31_PAIR_INSTRUCTION
#endif
#if (defined(__AVX512F__) && K31_LANES == 16) || (defined(__AVX2__) && K31_LANES == 8)
#include <immintrin.h>
#endif

namespace k31 {

constexpr int LANES = K31_LANES;

#define K31_EXPORT extern "C" __attribute__((visibility("default")))
#define K31_INLINE inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint64_t Longs __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

template <class V> K31_INLINE V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V> K31_INLINE void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }

template <class T> K31_INLINE T read(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class To, class From> K31_INLINE To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Compilers like to repeat a load at every use; where a tile is bound by its loads this keeps the value in a register.
#if (defined(__AVX512F__) && K31_LANES == 16) || (defined(__AVX2__) && K31_LANES == 8)
#define K31_KEEP(vector) asm("" : "+v"(vector))
#else
#define K31_KEEP(vector) (void)(vector)
#endif

K31_INLINE Floats splat(float x) { return x - Floats{}; }

// sum + a * b, rounded once where the machine can: left to the compiler, some sums are on some processors and some are not,
// and a result would depend on what is beside it.
K31_INLINE Floats fused(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__) && K31_LANES == 16
    return bits<Floats>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(sum)));
#elif defined(__FMA__) && K31_LANES == 8
    return bits<Floats>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(sum)));
#else
    return sum + a * b;
#endif
}

K31_INLINE constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- bfloat16

K31_INLINE float widen(uint16_t half) { return bits<float>(uint32_t(half) << 16); }

K31_INLINE Floats widen(Halves halves) {
    // Spelled out: of the general form GCC 12 makes two half conversions and a merge.
#if defined(__AVX512F__) && K31_LANES == 16
    return bits<Floats>(bits<Words>(_mm512_cvtepu16_epi32(bits<__m256i>(halves))) << 16);
#elif defined(__AVX2__) && K31_LANES == 8
    return bits<Floats>(bits<Words>(_mm256_cvtepu16_epi32(bits<__m128i>(halves))) << 16);
#else
    return bits<Floats>(__builtin_convertvector(halves, Words) << 16);
#endif
}

// Round to nearest even; a NaN keeps a set mantissa bit so that it cannot round to infinity.
K31_INLINE uint16_t narrow(float x) {
    uint32_t word = bits<uint32_t>(x);
    if (x != x) return uint16_t(word >> 16 | 0x40);
    return uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

// The same on LANES values that are finite, left in the low halves.
K31_INLINE Words narrow_finite(Floats x) {
    Words word = bits<Words>(x);
    return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

// ---- arithmetic whose treatment of NaN matters

K31_INLINE Floats relu(Floats x) { return x < Floats{} ? Floats{} : x; }  // a NaN stays one, as in torch

K31_INLINE Floats larger(Floats a, Floats b) { return b > a ? b : a; }

// exp(x) as mantissa * 2^exponent, for |x| < 2^22: a polynomial on what is left of x after whole powers of two.
struct SplitExp {
    Floats mantissa;
    Ints exponent;

    K31_INLINE explicit SplitExp(Floats x) {
        const float log2e = 1.44269504f, round_shift = 12582912.0f;  // 1.5 * 2^23
        Floats whole = x * log2e + round_shift;
        exponent = bits<Ints>(whole) - bits<int32_t>(round_shift);
        whole -= round_shift;
        Floats rest = x - whole * 0.693359375f;
        rest = rest + whole * 2.12194440e-4f;
        Floats p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
        p = p * rest + 8.3334519073e-3f;
        p = p * rest + 4.1665795894e-2f;
        p = p * rest + 1.6666665459e-1f;
        p = p * rest + 5.0000001201e-1f;
        mantissa = p * (rest * rest) + rest + 1.0f;
    }
};

K31_INLINE Floats power_of_two(Ints exponent) { return bits<Floats>((exponent + 127) << 23); }

// exp(x) for x <= 0 (a NaN gives NaN, anything below -87.3 gives 0), within 2 ulp.
K31_INLINE Floats exp_negative(Floats x) {
    const SplitExp e(x < -87.3f ? splat(-87.3f) : x);
    return x < -87.3f ? Floats{} : (x == x ? e.mantissa * power_of_two(e.exponent) : x);
}

// exp(x) for any x: infinite from 88.73 on, 0 below -87.3, NaN for a NaN; within 2 ulp.
K31_INLINE Floats exp_any(Floats x) {
    const SplitExp e(x < -87.3f ? splat(-87.3f) : (x > 90.0f ? splat(90.0f) : x));
    // 2^128 is no float, but e^88.5 needs it: the power goes in by halves.
    const Ints half = e.exponent >> 1;
    const Floats scaled = e.mantissa * power_of_two(half) * power_of_two(e.exponent - half);
    return x < -87.3f ? Floats{} : (x == x ? scaled : x);
}

// Lane i of the fold by `half` takes lane i + half.
struct Folds {
    int32_t from[LANES][LANES] = {};
    constexpr Folds() {
        for (int half = 1; half < LANES; half *= 2)
            for (int i = 0; i < LANES; i++) from[half][i] = (i + half) % LANES;
    }
};
inline constexpr Folds FOLDS;

// The order of the additions is fixed, so a sum does not depend on where its row stood in a tile.
K31_INLINE float sum_lanes(Floats x) {
    if constexpr (LANES == 4) return (x[0] + x[2]) + (x[1] + x[3]);
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2) x += __builtin_shuffle(x, load<Ints>(FOLDS.from[half]));
    return x[0];
}

// How two vectors, each in segments of 2 * half lanes, become one of all lower halves, and one of all upper ones.
struct Weaves {
    int32_t low[LANES][LANES] = {}, high[LANES][LANES] = {};
    constexpr Weaves() {
        for (int half = 1; half < LANES; half *= 2)
            for (int i = 0; i < LANES; i++) {
                low[half][i] = i / half * 2 * half + i % half;
                high[half][i] = low[half][i] + half;
            }
    }
};
inline constexpr Weaves WEAVES;

// Lane i of the result is what sum_lanes gives of row i, to the bit; the rows are used up.
K31_INLINE Floats sum_each(Floats (&rows)[LANES]) {
    if constexpr (LANES == 4) {
        Floats sums{};
        for (int i = 0; i < LANES; i++) sums[i] = sum_lanes(rows[i]);
        return sums;
    }
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) {
            const Floats a = rows[2 * i], b = rows[2 * i + 1];
            rows[i] = __builtin_shuffle(a, b, load<Ints>(WEAVES.low[half])) +
                      __builtin_shuffle(a, b, load<Ints>(WEAVES.high[half]));
        }
    return rows[0];
}

// One exchange of a transposition: of two rows, blocks of `half` lanes change places across the diagonal.
struct Exchanges {
    int32_t upper[LANES][LANES] = {}, lower[LANES][LANES] = {};
    constexpr Exchanges() {
        for (int half = 1; half < LANES; half *= 2)
            for (int i = 0; i < LANES; i++) {
                upper[half][i] = i & half ? i - half + LANES : i;
                lower[half][i] = i & half ? i + LANES : i + half;
            }
    }
};
inline constexpr Exchanges EXCHANGES;

K31_INLINE void transpose(Words (&rows)[LANES]) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & half) continue;
            const Words a = rows[i], b = rows[i + half];
            rows[i] = __builtin_shuffle(a, b, load<Ints>(EXCHANGES.upper[half]));
            rows[i + half] = __builtin_shuffle(a, b, load<Ints>(EXCHANGES.lower[half]));
        }
}

// ---- rows whose end need not fall on a whole vector

K31_INLINE Floats load_part(const float* from, int64_t count) {
    if (count >= LANES) return load<Floats>(from);
    Floats part{};
    std::memcpy(&part, from, size_t(count) * 4);
    return part;
}

K31_INLINE void store_part(float* to, Floats x, int64_t count) {
    if (count >= LANES) return store(to, x);
    std::memcpy(to, &x, size_t(count) * 4);
}

// body(at, left) for every vector of a row; `left` is a constant but for a last one that is not whole.
#define K31_BODY __attribute__((always_inline))
template <class Body> K31_INLINE void over_row(int64_t count, Body body) {
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) body(at, int64_t(LANES));
    if (at < count) body(at, count - at);
}

// While it lives, the thread takes subnormal numbers for zero: some processors need a hundred cycles for each.
class FlushSubnormals {
  public:
#if defined(__SSE__)
    FlushSubnormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
    ~FlushSubnormals() { __builtin_ia32_ldmxcsr(before_); }
#else
    FlushSubnormals() : before_(0) {}
#endif
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  private:
    [[maybe_unused]] unsigned before_;
};

}  // namespace k31
