// Register tiles: ROWS rows of one operand times VECS vectors of the other, over a shared depth.
//
// An *element* is 32 bits of depth: one float, or two bfloat16 where the machine multiplies pairs of them. A *step* of
// depth is one element of a row, or two where the other operand has columns for few lanes only.
// Each accumulator runs through the depth alone and in order: a result depends on its two operands only, never on
// the tile it fell into, so equal rows get equal results and thread counts do not matter.
#pragma once
#include <type_traits>

#include "simd.h"

namespace k31 {

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

K31_INLINE int64_t size_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

struct FloatDot {
    using Element = float;
    using Step = Element;
    static constexpr int PER_ELEMENT = 1;
    static K31_INLINE Floats step(Floats sum, Element row, Words panel) {
        return fused(sum, splat(row), bits<Floats>(panel));
    }
    static K31_INLINE Floats step(Floats sum, Words row, Words panel) {
        return fused(sum, bits<Floats>(row), bits<Floats>(panel));
    }
    static K31_INLINE Element pack(float low, float) { return low; }
};

struct PairDot {
    using Element = uint32_t;
    using Step = Element;
    static constexpr int PER_ELEMENT = 2;
#if defined(K31_PAIR_INSTRUCTION)
    static K31_INLINE Floats step(Floats sum, Element row, Words panel) {
        return step(sum, bits<Words>(_mm512_set1_epi32(int(row))), panel);
    }
    static K31_INLINE Floats step(Floats sum, Words row, Words panel) {
        return bits<Floats>(_mm512_dpbf16_ps(bits<__m512>(sum), bits<__m512bh>(row), bits<__m512bh>(panel)));
    }
#else
    static K31_INLINE Floats step(Floats sum, Element row, Words panel) {
        return step(sum, row - Words{}, panel);
    }
    static K31_INLINE Floats step(Floats sum, Words row, Words panel) {
        sum = fused(sum, bits<Floats>(row << 16), bits<Floats>(panel << 16));
        return fused(sum, bits<Floats>(row & 0xffff0000u), bits<Floats>(panel & 0xffff0000u));
    }
#endif
    static K31_INLINE Element pack(float low, float high) {
        return bits<uint32_t>(low) >> 16 | (bits<uint32_t>(high) & 0xffff0000u);  // both are bfloat16 already
    }
};

// Two elements of a row at once, for at most LANES / 2 columns: an even lane takes the first of both for its column, the
// odd lane beside it the second, and the two are added up in the end. With one element half of the lanes would idle.
template <class Dot> struct TwoSteps : Dot {
    using Step = uint64_t;
    static K31_INLINE Floats step(Floats sum, Step row, Words panel) {
        return Dot::step(sum, bits<Words>(row - Longs{}), panel);
    }
};

#if defined(K31_PAIRS) || defined(K31_PAIR_INSTRUCTION)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

// Accumulators, vectors and one broadcast must fit the registers: 16 of them, 32 under AVX-512.
constexpr int WIDEST = LANES == 16 ? 4 : 2;
template <int VECS> constexpr int TILE_ROWS = (VECS == 1 || (LANES == 16 && VECS == 2)) ? 12 : 6;
constexpr int ROW_BLOCK = 24;  // a multiple of every TILE_ROWS

// How many vectors the next panel takes when `left` vectors of columns remain.
K31_INLINE int panel_width(int64_t left) { return left >= WIDEST ? WIDEST : left >= 2 ? 2 : 1; }

// Call f(width in vectors as a constant, first vector) for each panel of `vectors` vectors, at most MOST wide.
template <int MOST = WIDEST, class F> K31_INLINE void for_panels(int64_t vectors, F f) {
    for (int64_t v = 0; v < vectors;) {
        const int width = vectors - v >= MOST ? MOST : panel_width(vectors - v);
        if (width == 1) f(std::integral_constant<int, 1>{}, v);
        else if (width == 2) f(std::integral_constant<int, 2>{}, v);
        else f(std::integral_constant<int, MOST>{}, v);
        v += width;
    }
}

// sum[m][v] += rows[m][k] . panel[k][v] for steps k in [first, last); the panel is [steps][VECS][LANES] elements. The steps of a row
// lie side by side, or STRIDED: `stride` bytes apart.
template <class Dot, bool STRIDED, int ROWS, int VECS>
K31_INLINE void multiply(const char* const (&rows)[ROWS], int64_t first, int64_t last,
                         const typename Dot::Element* panel, Floats (&sum)[ROWS][VECS], int64_t stride) {
    using Step = typename Dot::Step;
    for (int64_t k = first; k < last; k++) {
        Words column[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
            column[v] = load<Words>(panel + (k * VECS + v) * LANES);
            K31_KEEP(column[v]);
        }
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            const auto step = read<Step>(rows[m] + k * (STRIDED ? stride : int64_t(sizeof(Step))));
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[m][v] = Dot::step(sum[m][v], step, column[v]);
        }
    }
}

// The same into sums in memory.
// Not inlined: next to a caller's own values the accumulators would no longer fit the registers.
template <class Dot, int ROWS, int VECS, bool STRIDED = false>
__attribute__((noinline)) void dot_tile(const char* const* rows, int64_t depth, const typename Dot::Element* panel,
                                        Floats (&sums)[ROWS][VECS], int64_t stride = 4) {
    const char* row[ROWS];
    Floats sum[ROWS][VECS];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        row[m] = rows[m];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[m][v] = sums[m][v];
    }
    multiply<Dot, STRIDED>(row, 0, depth, panel, sum, stride);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[m][v] = sum[m][v];
}

K31_INLINE float element_of(const void* from, int64_t dtype, int64_t index) {
    return dtype == FLOAT32 ? read<float>(static_cast<const char*>(from) + index * 4)
                            : widen(read<uint16_t>(static_cast<const char*>(from) + index * 2));
}

// How many elements of depth a row of `width` numbers takes.
template <class Dot> K31_INLINE int64_t depth_of(int64_t width) {
    return (width + Dot::PER_ELEMENT - 1) / Dot::PER_ELEMENT;
}

// In how many steps they are multiplied: a row for two of them at once has an even number of elements.
template <class Dot> K31_INLINE int64_t steps_of(int64_t width) {
    return depth_of<Dot>(width) * 4 / int64_t(sizeof(typename Dot::Step));
}

// Whether a row can be read as elements where it lies.
template <class Dot> K31_INLINE bool in_place(int64_t dtype, int64_t width) {
    return Dot::PER_ELEMENT == 1 ? dtype == FLOAT32 : width % 2 == 0;
}

// Heads [first, first + vecs * LANES) of `width` numbers each become elements [depth][vecs * LANES], or as many columns of
// a panel that is `stride` wide; heads that do not exist, and the second half of a last pair, become zero.
template <class Dot>
void pack_panel(const char* query, int64_t dtype, int64_t head_stride, int64_t heads, int64_t first, int vecs,
                int64_t width, typename Dot::Element* panel, int64_t stride = 0) {
    const int64_t columns = int64_t(vecs) * LANES, depth = depth_of<Dot>(width);
    if (!stride) stride = columns;
    if (LANES > 4 && in_place<Dot>(dtype, width) && depth % LANES == 0 && first + columns <= heads) {
        for (int64_t c = 0; c < columns; c += LANES)
            for (int64_t d = 0; d < depth; d += LANES) {
                Words square[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    square[i] = load<Words>(query + (first + c + i) * head_stride * size_of(dtype) + d * 4);
                transpose(square);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) store(panel + (d + i) * stride + c, square[i]);
            }
        return;
    }
    for (int64_t c = 0; c < columns; c++) {
        const bool real = first + c < heads;
        const char* row = query + (first + c) * head_stride * size_of(dtype);
        for (int64_t d = 0; d < depth; d++) {
            const int64_t i = d * Dot::PER_ELEMENT;
            const float low = real ? element_of(row, dtype, i) : 0.0f;
            const float high = real && Dot::PER_ELEMENT == 2 && i + 1 < width ? element_of(row, dtype, i + 1) : 0.0f;
            panel[d * stride + c] = Dot::pack(low, high);
        }
    }
}

// The same of up to LANES / 2 heads, for two elements a step: their columns side by side.
template <class Dot>
void pack_panel(TwoSteps<Dot>, const char* query, int64_t dtype, int64_t head_stride, int64_t heads, int64_t width,
                typename Dot::Element* panel, int64_t stride) {
    const int64_t depth = depth_of<Dot>(width);
    for (int64_t d = 0; d < depth / 2; d++) store(panel + d * stride, Words{});
    for (int64_t h = 0; h < heads; h++) {
        const char* row = query + h * head_stride * size_of(dtype);
        for (int64_t d = 0; d < depth; d++) {
            const int64_t i = d * Dot::PER_ELEMENT;
            const float low = element_of(row, dtype, i), high = Dot::PER_ELEMENT == 2 ? element_of(row, dtype, i + 1) : 0;
            panel[d / 2 * stride + h * 2 + d % 2] = Dot::pack(low, high);
        }
    }
}

// A row of numbers as elements, the last pair filled up with zero.
inline void copy_row(FloatDot, const char* from, int64_t dtype, int64_t width, char* to) {
    if (dtype == FLOAT32) {
        std::memcpy(to, from, size_t(width) * 4);
        return;
    }
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(to + i * 4, widen(load<Halves>(from + i * 2)));
    for (; i < width; i++) store(to + i * 4, widen(read<uint16_t>(from + i * 2)));
}

inline void copy_row(PairDot, const char* from, int64_t, int64_t width, char* to) {
    std::memcpy(to, from, size_t(width) * 2);
    if (width % 2) store(to + width * 2, uint16_t(0));
}

#if defined(__AVX512BW__) && K31_LANES == 16
typedef uint16_t WideHalves __attribute__((vector_size(64)));
struct Pairing {
    uint16_t at[2][32] = {};
    constexpr Pairing() {
        for (int i = 0; i < 64; i++) at[i / 32][i % 32] = uint16_t(i / 2 + i % 2 * 32);
    }
};
inline constexpr Pairing PAIRING;
#endif

// Two bfloat16 rows as pairs, the first one low; a missing second row counts as zeros.
inline void interleave(const char* low, const char* high, int64_t width, char* to) {
    int64_t i = 0;
#if defined(__AVX512BW__) && K31_LANES == 16
    // Spelled out: two numbers of each row a word, by one shuffle each for the lower and the upper half.
    for (; high && i + 2 * LANES <= width; i += 2 * LANES) {
        const auto a = load<WideHalves>(low + i * 2), b = load<WideHalves>(high + i * 2);
        store(to + i * 4, __builtin_shuffle(a, b, load<WideHalves>(PAIRING.at[0])));
        store(to + (i + LANES) * 4, __builtin_shuffle(a, b, load<WideHalves>(PAIRING.at[1])));
    }
#endif
    for (; i + LANES <= width; i += LANES) {
        Words pair = __builtin_convertvector(load<Halves>(low + i * 2), Words);
        if (high) pair |= __builtin_convertvector(load<Halves>(high + i * 2), Words) << 16;
        store(to + i * 4, pair);
    }
    for (; i < width; i++)
        store(to + i * 4, read<uint16_t>(low + i * 2) | (high ? uint32_t(read<uint16_t>(high + i * 2)) << 16 : 0));
}

}  // namespace k31
