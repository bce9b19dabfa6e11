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

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace k31 {

constexpr int LANES = K31_LANES;

#define K31_EXPORT extern "C" __attribute__((visibility("default")))
#define K31_INLINE inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
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

K31_INLINE constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- bfloat16

K31_INLINE float widen(uint16_t half) { return bits<float>(uint32_t(half) << 16); }

K31_INLINE Floats widen(Halves halves) {
#if defined(__AVX2__) && K31_LANES == 8
    return bits<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits<__m128i>(halves)), 16));  // gcc 12 takes five
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

// exp(x) for x <= 0 (a NaN gives NaN, anything below -87.3 gives 0), within 2 ulp: exp2 of an integer by the
// exponent field, of the rest by a polynomial.
K31_INLINE Floats exp_negative(Floats x) {
    const float log2e = 1.44269504f, round_shift = 12582912.0f;  // 1.5 * 2^23
    Floats clamped = x < -87.3f ? splat(-87.3f) : x;
    Floats whole = clamped * log2e + round_shift;
    Ints exponent = bits<Ints>(whole) - bits<int32_t>(round_shift);
    whole -= round_shift;
    Floats rest = clamped - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    Floats p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * (rest * rest) + rest + 1.0f;
    Floats scaled = p * bits<Floats>((exponent + 127) << 23);
    return x < -87.3f ? Floats{} : (x == x ? scaled : x);
}

// The order of the additions is fixed, so a sum does not depend on where its row stood in a tile.
K31_INLINE float sum_lanes(Floats x) {
    float lane[LANES];
    store(lane, x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

}  // namespace k31
