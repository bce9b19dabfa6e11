// One block of gathered keys: logits, online softmax, mixing of values. Head vectors lie across the lanes for the
// logits and down the rows for the mixing; all of it happens in the calling thread's scratch.
#pragma once
#include <algorithm>

#include "cache.h"
#include "tile.h"

namespace k31 {

struct AttentionCall {
    Operand query;
    Operand query_rope;
    Operand key;
    Operand key_rope;
    Operand value;
    Paging paging;
    Lengths lengths;
    Mask mask;
    const char* indices;
    int64_t index_bytes;
    int64_t index_stride_request;
    int64_t index_stride_row;
    int64_t count;
    int64_t heads;
    int64_t groups;
    int64_t width;
    int64_t rope_width;
    int64_t value_width;
    double scale;
    int64_t threads;
    char* result;
    int64_t result_dtype;
    int64_t failed;
};

constexpr int64_t KEYS = 4 * ROW_BLOCK;    // gathered rows of 576 floats stay in the second-level cache
constexpr int64_t HEAD_TILE = 4;           // divides every LANES
constexpr int MIX_VECTORS = LANES == 16 ? 4 : 3;  // with as many heads as many sums as registers have room for

// Sizes that follow from a call, in elements or numbers.
template <class Dot> struct Shape {
    int64_t heads, head_lanes, key_depth, depth, value_lanes;
    bool value_is_key;  // absorbed MLA: the values are the leading numbers of the keys

    explicit Shape(const AttentionCall& call)
        : heads(call.heads / call.groups), head_lanes(round_up(heads, LANES)), key_depth(depth_of<Dot>(call.width)),
          depth(key_depth + depth_of<Dot>(call.rope_width)), value_lanes(round_up(call.value_width, LANES)) {
        const Operand &k = call.key, &v = call.value;
        value_is_key = k.data == v.data && k.dtype == v.dtype && k.stride_outer == v.stride_outer &&
                       k.stride_row == v.stride_row && k.stride_head == v.stride_head &&
                       call.value_width <= call.width;
    }
};

// Softmax state of the heads over the keys seen so far: unnormalised output, maximum, sum of weights.
struct Partial {
    float* output;  // [head_lanes][value_lanes]
    float* top;     // [head_lanes]
    float* total;   // [head_lanes]

    template <class Dot> static Partial carve(Carver& from, const Shape<Dot>& shape) {
        return {from.take<float>(shape.head_lanes * shape.value_lanes), from.take<float>(shape.head_lanes),
                from.take<float>(shape.head_lanes)};
    }
    template <class Dot> void clear(const Shape<Dot>& shape) {
        std::fill(output, output + shape.head_lanes * shape.value_lanes, 0.0f);
        std::fill(top, top + shape.head_lanes, -__builtin_inff());
        std::fill(total, total + shape.head_lanes, 0.0f);
    }
};

// A maximum that can be subtracted: -inf stands for "nothing yet" and must not make inf - inf.
K31_INLINE Floats subtractable(Floats top) { return top == -__builtin_inff() ? Floats{} : top; }

// Rows that are needed soon, fetched a few at a time between other work: the outer caches take only so many at once.
struct Expected {
    const AttentionCall& call;
    const RequestCache& cache;
    int64_t head;
    const int64_t* positions;
    int64_t count;

    void fetch(int64_t rows) {
        for (; rows > 0 && count > 0; rows--, count--, positions++) {
            part(call.key, call.width);
            if (call.rope_width) part(call.key_rope, call.rope_width);
            if (call.value.data != call.key.data) part(call.value, call.value_width);
        }
    }
    void part(const Operand& from, int64_t width) const {
        prefetch_far(cache.row(from, *positions, head), width * size_of(from.dtype));
    }
};

template <class Dot> struct Block {
    using Element = typename Dot::Element;
    const char *rows[KEYS], *ropes[KEYS];  // the keys as elements, here or in the cache itself, and their ropes
    char* keys;        // [KEYS][depth] elements, the rope after the rest
    char* values;      // FloatDot: [KEYS][value_lanes] floats; PairDot: [KEYS / 2][value_lanes] pairs of keys
    float* logits;     // [KEYS][head_lanes]; FloatDot's weights too
    Words* weights;    // PairDot: [KEYS / 2][head_lanes] pairs
    float* decay;      // [head_lanes]

    static Block carve(Carver& from, const Shape<Dot>& s) {
        // One vector more than the rows: the last tile of the values reads whole vectors.
        Block block;
        block.keys = from.take<char>((KEYS * s.depth + LANES) * 4);
        block.values = from.take<char>((KEYS * s.value_lanes + LANES) * 4);
        block.logits = from.take<float>(KEYS * s.head_lanes);
        block.weights = from.take<Words>(KEYS / 2 * s.head_lanes / LANES);
        block.decay = from.take<float>(s.head_lanes);
        return block;
    }

    void gather(const AttentionCall& call, const Shape<Dot>& s, const RequestCache& cache, int64_t head,
                const int64_t* positions, int64_t n);
    void score(const Shape<Dot>& s, const Element* query, int64_t n, float scale, const float* biases,
               Expected& expected);
    void weigh(const Shape<Dot>& s, int64_t n, Partial& state);
    void mix(const Shape<Dot>& s, int64_t n, Partial& state, Expected& expected) const;
};

// Whether keys are elements where they lie: pairs of bfloat16, or floats, whose leading numbers can then be the values of
// whole vectors too.
template <class Dot> bool reads_in_place(const AttentionCall& call, const Shape<Dot>& s) {
    if (!in_place<Dot>(call.key.dtype, call.width)) return false;
    if (call.rope_width && !in_place<Dot>(call.key_rope.dtype, call.rope_width)) return false;
    return Dot::PER_ELEMENT == 2 || !s.value_is_key || s.value_lanes <= call.width;
}

// Bring n named rows here as elements; those that are elements already stay where they are.
template <class Dot>
void Block<Dot>::gather(const AttentionCall& call, const Shape<Dot>& s, const RequestCache& cache, int64_t head,
                        const int64_t* positions, int64_t n) {
    const bool direct = reads_in_place(call, s);
    const char* previous = nullptr;
    for (int64_t j = 0; j < n; j++) {
        char* key = keys + j * s.depth * 4;
        rows[j] = cache.row(call.key, positions[j], head);
        ropes[j] = call.rope_width ? cache.row(call.key_rope, positions[j], head) : rows[j];
        if (!direct) {
            copy_row(Dot{}, rows[j], call.key.dtype, call.width, key);
            if (call.rope_width)
                copy_row(Dot{}, ropes[j], call.key_rope.dtype, call.rope_width, key + s.key_depth * 4);
            rows[j] = key;
            ropes[j] = key + s.key_depth * 4;
        }
        const char* value = cache.row(call.value, positions[j], head);
        if constexpr (Dot::PER_ELEMENT == 1) {
            if (!s.value_is_key)
                copy_row(Dot{}, value, call.value.dtype, call.value_width, values + j * s.value_lanes * 4);
        } else if (j % 2 || j + 1 == n) {
            const char *low = j % 2 ? previous : value, *high = j % 2 ? value : nullptr;
            interleave(low, high, call.value_width, values + j / 2 * s.value_lanes * 4);
        }
        previous = value;
    }
    // Whole tiles: what these rows give is dropped.
    for (int64_t j = n; j < KEYS; j++) {
        rows[j] = rows[n - 1];
        ropes[j] = ropes[n - 1];
    }
}

// logits[j][h] = scale * key_j . query_h, for VECS head vectors.
template <class Dot, int VECS>
void score_heads(const Block<Dot>& block, const Shape<Dot>& s, int64_t n, const typename Dot::Element* panel,
                 float scale, float* logits, Expected& expected) {
    constexpr int ROWS = TILE_ROWS<VECS>;
    for (int64_t j = 0; j < n; j += ROWS) {
        expected.fetch(ROWS / 2);
        Floats dots[ROWS][VECS] = {};
        dot_tile<Dot, ROWS, VECS>(block.rows + j, s.key_depth, panel, dots);
        if (s.depth > s.key_depth)
            dot_tile<Dot, ROWS, VECS>(block.ropes + j, s.depth - s.key_depth, panel + s.key_depth * VECS * LANES, dots);
        for (int m = 0; m < ROWS; m++)
            for (int v = 0; v < VECS; v++) store(logits + (j + m) * s.head_lanes + v * LANES, dots[m][v] * scale);
    }
}

// `biases` holds what a float mask adds to each key's logits, and is null without one.
template <class Dot>
void Block<Dot>::score(const Shape<Dot>& s, const Element* query, int64_t n, float scale, const float* biases,
                       Expected& expected) {
    const int64_t vectors = s.head_lanes / LANES;
    for (int64_t v = 0; v < vectors;) {
        const int width = panel_width(vectors - v);
        auto heads = width == 1 ? score_heads<Dot, 1> : width == 2 ? score_heads<Dot, 2> : score_heads<Dot, WIDEST>;
        heads(*this, s, n, query + v * LANES * s.depth, scale, logits + v * LANES, expected);
        v += width;
    }
    if (!biases) return;
    for (int64_t j = 0; j < n; j++)
        for (int64_t h = 0; h < s.head_lanes; h++) logits[j * s.head_lanes + h] += biases[j];
}

// Logits become weights; the state's maximum and sum move on, `decay` says how much its output shrinks.
template <class Dot> void Block<Dot>::weigh(const Shape<Dot>& s, int64_t n, Partial& state) {
    for (int64_t h = 0; h < s.head_lanes; h += LANES) {
        const Floats before = load<Floats>(state.top + h);
        Floats top = before;
        for (int64_t j = 0; j < n; j++) top = larger(top, load<Floats>(logits + j * s.head_lanes + h));
        const Floats base = subtractable(top), shrink = exp_negative(before - base);
        Floats total = load<Floats>(state.total + h) * shrink;
        for (int64_t j = 0; j < n; j++) {
            float* place = logits + j * s.head_lanes + h;
            Floats weight = exp_negative(load<Floats>(place) - base);
            if constexpr (Dot::PER_ELEMENT == 2) {
                // Summed as rounded, so that the weights that are used still add up to one.
                const Words half = narrow_finite(weight);
                weight = bits<Floats>(half << 16);
                Words& pair = weights[(j / 2 * s.head_lanes + h) / LANES];
                pair = j % 2 ? pair | half << 16 : half;
            }
            total += weight;
            store(place, weight);
        }
        store(state.top + h, top);
        store(state.total + h, total);
        store(decay + h, shrink);
    }
}

// Where the values of a step of keys are: side by side here, or in their rows.
struct SideBySide {
    const char* values;
    int64_t stride;
    K31_INLINE const char* at(int64_t j) const { return values + j * stride; }
};
struct InRows {
    const char* const* rows;
    int64_t offset;
    K31_INLINE const char* at(int64_t j) const { return rows[j] + offset; }
};

// output[h][d] = output[h][d] * decay[h] + sum_j weight[j][h] * value[j][d], for HEAD_TILE heads and VECS vectors.
template <class Dot, int VECS, class Values>
void mix_tile(const char* weights, int64_t head_lanes, const Values& values, int64_t depth, const float* decay,
              float* output, int64_t output_stride) {
    Floats sum[HEAD_TILE][VECS];
    for (int h = 0; h < HEAD_TILE; h++)
        for (int v = 0; v < VECS; v++) sum[h][v] = load<Floats>(output + h * output_stride + v * LANES) * decay[h];
    for (int64_t j = 0; j < depth; j++) {
        Words value[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
            value[v] = load<Words>(values.at(j) + v * LANES * 4);
            K31_KEEP(value[v]);
        }
#pragma GCC unroll 4
        for (int h = 0; h < HEAD_TILE; h++) {
            const auto weight = read<typename Dot::Element>(weights + (j * head_lanes + h) * 4);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[h][v] = Dot::step(sum[h][v], weight, value[v]);
        }
    }
    for (int h = 0; h < HEAD_TILE; h++)
        for (int v = 0; v < VECS; v++) store(output + h * output_stride + v * LANES, sum[h][v]);
}

template <class Dot>
void Block<Dot>::mix(const Shape<Dot>& s, int64_t n, Partial& state, Expected& expected) const {
    const bool in_keys = Dot::PER_ELEMENT == 1 && s.value_is_key;
    const char* weight = Dot::PER_ELEMENT == 1 ? reinterpret_cast<const char*>(logits)
                                               : reinterpret_cast<const char*>(weights);
    const int64_t vectors = s.value_lanes / LANES, depth = depth_of<Dot>(n);
    for_panels<MIX_VECTORS>(vectors, [&](auto width, int64_t d) {
        for (int64_t h = 0; h < s.heads; h += HEAD_TILE) {
            expected.fetch(2);
            const auto tile = [&](const auto& values) {
                mix_tile<Dot, width.value>(weight + h * 4, s.head_lanes, values, depth, decay + h,
                                           state.output + h * s.value_lanes + d * LANES, s.value_lanes);
            };
            if (in_keys) tile(InRows{rows, d * LANES * 4});
            else tile(SideBySide{values + d * LANES * 4, s.value_lanes * 4});
        }
    });
}

}  // namespace k31
