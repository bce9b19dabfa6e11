// Products of one projection with the tokens of one expert, without ever copying the projection:
//
//                       rows of numbers side by side      columns of numbers side by side (transposed)
//   fewer than LANES    depth across the lanes            outputs across the lanes, sums in memory
//   more tokens         tokens across the lanes           outputs across the lanes, sums in registers
//
// With tokens across the lanes two bfloat16 are multiplied as a pair, the projection read where it lies; what they are
// multiplied with must be bfloat16 as well.
//
// A sum runs through the depth in an order that only the form decides.
#pragma once
#include <algorithm>

#include "cache.h"
#include "tile.h"

namespace k31 {

constexpr int64_t CHUNK = 192;        // outputs of one product: whole panels and tiles whatever LANES is
constexpr int64_t DEPTH_STEP = 256;   // depth whose panels of a chunk stay in the second-level cache
constexpr int64_t ROW_GROUP = 12;     // a multiple of every TILE_ROWS
constexpr int64_t DOT_TOKENS = 3;     // tokens that share a load of numbers
constexpr int64_t COLUMN_TOKENS = 2;  // tokens, and depths, that share a load of sums
constexpr int64_t COLUMN_DEPTHS = 4;
constexpr int64_t AHEAD = 8;          // lines between what is read of columns and what is fetched

// One expert's projection; `stride` is between rows, or between columns of a transposed one.
struct Matrix {
    const char* data;
    int64_t dtype;
    int64_t stride;
    bool transposed;

    K31_INLINE const char* at(int64_t line, int64_t place) const {
        return data + (line * stride + place) * size_of(dtype);
    }
    // Lines [from, to) are wanted soon, `count` numbers of each: the processor would not see in time where they lie.
    K31_INLINE void announce(int64_t from, int64_t to, int64_t place, int64_t count) const {
        for (int64_t line = from; line < to; line++) prefetch(at(line, place), count * size_of(dtype));
    }
};

struct Matrices {
    const char* data;          // packed, or null:
    const char* const* table;  // one pointer per expert
    int64_t stride_expert;
    int64_t stride_output;
    int64_t stride_input;
    int64_t dtype;

    bool transposed() const { return stride_input != 1; }
    Matrix of(int64_t expert) const {
        const char* from = table ? table[expert] : data + expert * stride_expert * size_of(dtype);
        return {from, dtype, transposed() ? stride_input : stride_output, transposed()};
    }
};

// Whether tokens lie across the lanes: activations are then panels [depth][vectors][LANES] and results
// [output][token], else both have one row per token.
K31_INLINE bool by_lanes(bool transposed, int64_t tokens) { return !transposed && tokens >= LANES; }

// Space that products of `depth` numbers need besides their operands.
struct ProductScratch {
    char* copies;   // ROW_GROUP rows as floats
    float* panels;  // DEPTH_STEP of a chunk's columns

    static ProductScratch carve(Carver& from, int64_t depth) {
        return {from.take<char>(ROW_GROUP * depth * 4), from.take<float>(DEPTH_STEP * CHUNK)};
    }
};

// The outputs [first, first + count) of a product, count <= CHUNK.
struct Part {
    const Matrix& matrix;
    int64_t first;
    int64_t count;
    int64_t depth;
};

template <bool HALF> K31_INLINE Floats load_numbers(const char* from) {
    if constexpr (HALF) return widen(load<Halves>(from));
    else return load<Floats>(from);
}

// out[j][lane] (+)= rows[j] . panel, for n rows; whole tiles are computed, so rows up to the next multiple exist.
template <class Dot, int VECS>
void multiply_panel(const char* const* rows, int64_t n, int64_t depth, const typename Dot::Element* panel, bool fresh,
                    float* out, int64_t stride) {
    constexpr int ROWS = TILE_ROWS<VECS>;
    for (int64_t j = 0; j < n; j += ROWS) {
        Floats sums[ROWS][VECS] = {};
        const int real = int(std::min<int64_t>(ROWS, n - j));
        for (int m = 0; m < real && !fresh; m++)
            for (int v = 0; v < VECS; v++) sums[m][v] = load<Floats>(out + (j + m) * stride + v * LANES);
        dot_tile<Dot, ROWS, VECS>(rows + j, depth, panel, sums);
        for (int m = 0; m < real; m++)
            for (int v = 0; v < VECS; v++) store(out + (j + m) * stride + v * LANES, sums[m][v]);
    }
}

// Tokens across the lanes: out[output][token], rows of whole vectors.
template <class Dot>
void multiply_rows(const Part& part, const typename Dot::Element* panels, int64_t tokens, float* out, char* copies) {
    const Matrix& matrix = part.matrix;
    const int64_t vectors = round_up(tokens, LANES) / LANES, stride = vectors * LANES;
    const int64_t depth = depth_of<Dot>(part.depth);
    for (int64_t f = 0; f < part.count; f += ROW_GROUP) {
        const int64_t n = std::min(ROW_GROUP, part.count - f), next = std::min(f + 2 * ROW_GROUP, part.count);
        matrix.announce(part.first + f + ROW_GROUP, part.first + next, 0, part.depth);
        const char* rows[ROW_GROUP];
        for (int64_t r = 0; r < ROW_GROUP; r++) {
            if (r >= n) {
                rows[r] = rows[n - 1];
                continue;
            }
            rows[r] = matrix.at(part.first + f + r, 0);
            if (in_place<Dot>(matrix.dtype, part.depth)) continue;
            copy_row(Dot{}, rows[r], matrix.dtype, part.depth, copies + r * part.depth * 4);
            rows[r] = copies + r * part.depth * 4;
        }
        for_panels(vectors, [&](auto width, int64_t v) {
            multiply_panel<Dot, width.value>(rows, n, depth, panels + v * LANES * depth, true,
                                             out + f * stride + v * LANES, stride);
        });
    }
}

// Depths [from, from + depth) of a chunk's columns as panels [depth][vectors][LANES], zeros beyond the last column.
inline void pack_columns(const Part& part, int64_t from, int64_t depth, float* panels) {
    const int64_t vectors = round_up(part.count, LANES) / LANES;
    for (int64_t d = 0; d < depth; d++) {
        const char* line = part.matrix.at(from + d, part.first);
        part.matrix.announce(from + std::min(d + AHEAD, depth), from + std::min(d + AHEAD + 1, depth), part.first,
                             part.count);
        for_panels(vectors, [&](auto width, int64_t v) {
            float* to = panels + v * LANES * depth + d * width.value * LANES;
            const int64_t real = std::min<int64_t>(width.value * LANES, part.count - v * LANES);
            copy_row(FloatDot{}, line + v * LANES * size_of(part.matrix.dtype), part.matrix.dtype, real,
                     reinterpret_cast<char*>(to));
            std::fill(to + real, to + width.value * LANES, 0.0f);
        });
    }
}

// Outputs across the lanes, sums in registers: out[token][CHUNK].
inline void multiply_columns(const Part& part, const float* activations, int64_t tokens, float* out, float* panels) {
    const int64_t vectors = round_up(part.count, LANES) / LANES;
    for (int64_t d = 0; d < part.depth; d += DEPTH_STEP) {
        const int64_t depth = std::min(DEPTH_STEP, part.depth - d);
        pack_columns(part, d, depth, panels);
        for_panels(vectors, [&](auto width, int64_t v) {
            for (int64_t t = 0; t < tokens; t += ROW_GROUP) {
                const char* rows[ROW_GROUP];
                for (int64_t r = 0; r < ROW_GROUP; r++)
                    rows[r] = reinterpret_cast<const char*>(activations + std::min(t + r, tokens - 1) * part.depth + d);
                multiply_panel<FloatDot, width.value>(rows, std::min(ROW_GROUP, tokens - t), depth,
                                                      panels + v * LANES * depth, d == 0, out + t * CHUNK + v * LANES,
                                                      CHUNK);
            }
        });
    }
}

// Depth across the lanes: out[token][CHUNK] for TOKENS tokens.
template <bool HALF, int64_t TOKENS> void dot_rows(const Part& part, const float* activations, float* out) {
    constexpr int64_t BYTES = HALF ? 2 : 4, ROWS = TOKENS == 1 ? 8 : TOKENS == 2 ? 6 : 4;  // sums that fit 16 registers
    const int64_t whole = part.depth / LANES * LANES;
    for (int64_t f = 0; f < part.count; f += ROWS) {
        const char* rows[ROWS];
        for (int64_t r = 0; r < ROWS; r++)
            rows[r] = part.matrix.at(part.first + std::min(f + r, part.count - 1), 0);
        // The rows after these: a line at a time, as many as are read, or the fetches would wait for each other.
        const int64_t ahead = f + ROWS < part.count ? ROWS * part.matrix.stride * BYTES : 0;
        Floats sums[ROWS][TOKENS] = {};
        for (int64_t d = 0; d < whole; d += LANES) {
            Floats row[TOKENS];
            for (int64_t t = 0; t < TOKENS; t++) row[t] = load<Floats>(activations + t * part.depth + d);
            if (d * BYTES % 64 == 0) {
#pragma GCC unroll 8
                for (int64_t r = 0; r < ROWS; r++) __builtin_prefetch(rows[r] + d * BYTES + ahead, 0, 2);
            }
#pragma GCC unroll 8
            for (int64_t r = 0; r < ROWS; r++) {
                const Floats numbers = load_numbers<HALF>(rows[r] + d * BYTES);
#pragma GCC unroll 4
                for (int64_t t = 0; t < TOKENS; t++) sums[r][t] += numbers * row[t];
            }
        }
        for (int64_t r = 0; r < std::min(ROWS, part.count - f); r++)
            for (int64_t t = 0; t < TOKENS; t++) {
                float sum = sum_lanes(sums[r][t]);
                for (int64_t d = whole; d < part.depth; d++)
                    sum += element_of(rows[r], part.matrix.dtype, d) * activations[t * part.depth + d];
                out[t * CHUNK + f + r] = sum;
            }
    }
}

// Outputs across the lanes, sums in memory: out[token][CHUNK] += over DEPTHS numbers of TOKENS tokens from depth d.
template <bool HALF, int64_t TOKENS, int64_t DEPTHS>
K31_INLINE void add_lines(const Part& part, int64_t d, const float* activations, float* out) {
    const char* lines[DEPTHS];
    float factor[TOKENS][DEPTHS];
    for (int64_t i = 0; i < DEPTHS; i++) {
        lines[i] = part.matrix.at(d + i, part.first);
        for (int64_t t = 0; t < TOKENS; t++) factor[t][i] = activations[t * part.depth + d + i];
    }
    part.matrix.announce(d + AHEAD, std::min(d + AHEAD + DEPTHS, part.depth), part.first, part.count);
    int64_t c = 0;
    for (; c + LANES <= part.count; c += LANES) {
        Floats sums[TOKENS];
        for (int64_t t = 0; t < TOKENS; t++) sums[t] = load<Floats>(out + t * CHUNK + c);
#pragma GCC unroll 4
        for (int64_t i = 0; i < DEPTHS; i++) {
            const Floats numbers = load_numbers<HALF>(lines[i] + c * (HALF ? 2 : 4));
#pragma GCC unroll 4
            for (int64_t t = 0; t < TOKENS; t++) sums[t] += numbers * factor[t][i];
        }
        for (int64_t t = 0; t < TOKENS; t++) store(out + t * CHUNK + c, sums[t]);
    }
    for (; c < part.count; c++)
        for (int64_t t = 0; t < TOKENS; t++)
            for (int64_t i = 0; i < DEPTHS; i++)
                out[t * CHUNK + c] += element_of(lines[i], part.matrix.dtype, c) * factor[t][i];
}

template <bool HALF, int64_t TOKENS> void add_columns(const Part& part, const float* activations, float* out) {
    std::fill(out, out + TOKENS * CHUNK, 0.0f);
    int64_t d = 0;
    for (; d + COLUMN_DEPTHS <= part.depth; d += COLUMN_DEPTHS)
        add_lines<HALF, TOKENS, COLUMN_DEPTHS>(part, d, activations, out);
    for (; d < part.depth; d++) add_lines<HALF, TOKENS, 1>(part, d, activations, out);
}

template <bool HALF> void multiply_few(const Part& part, const float* activations, int64_t tokens, float* out) {
    const int64_t step = part.matrix.transposed ? COLUMN_TOKENS : DOT_TOKENS;
    for (int64_t t = 0; t < tokens; t += step) {
        const float* from = activations + t * part.depth;
        float* to = out + t * CHUNK;
        const int64_t now = std::min(step, tokens - t);
        if (part.matrix.transposed) (now == 1 ? add_columns<HALF, 1> : add_columns<HALF, 2>)(part, from, to);
        else (now == 1 ? dot_rows<HALF, 1> : now == 2 ? dot_rows<HALF, 2> : dot_rows<HALF, 3>)(part, from, to);
    }
}

// The product of a part with `tokens` activations, both laid out as by_lanes says; `pairs`: panels hold pairs.
inline void multiply(const Part& part, const float* activations, int64_t tokens, float* out, ProductScratch& scratch,
                     bool pairs = false) {
    if (tokens < LANES)
        (part.matrix.dtype == BFLOAT16 ? multiply_few<true> : multiply_few<false>)(part, activations, tokens, out);
    else if (part.matrix.transposed) multiply_columns(part, activations, tokens, out, scratch.panels);
    else if (pairs)
        multiply_rows<PairDot>(part, reinterpret_cast<const uint32_t*>(activations), tokens, out, scratch.copies);
    else multiply_rows<FloatDot>(part, activations, tokens, out, scratch.copies);
}

}  // namespace k31
