// The delta rule token by token: a step brings the state near once, reads it there once more, and writes it once.
#pragma once
#include "delta_call.h"

namespace k31 {

// Rows of a state.
struct Rows {
    float* data;
    int64_t stride;
    float* operator[](int64_t row) const { return data + row * stride; }
};

// What the value channels of one token have in common.
struct Columns {
    Rows from, to;
    int64_t width;
    float beta, overlap;
    float* output;
};

constexpr int ROWS_TOGETHER = 4;  // rows whose sums across the lanes need not wait for each other

constexpr int64_t ROWS_AHEAD = 3 * LANES / 2;

struct Step {
    Token token;
    float *decayed_key, *decayed_query;  // [width]
    float* value;                        // [depth]

    static Step carve(Carver& from, const DeltaCall& call) {
        const int64_t width = round_up(call.width, LANES), depth = round_up(call.depth, LANES);
        const auto take = [&](int64_t count) { return from.take<float>(count); };
        Step step{Token::carve(from, call.width)};
        for (float** row : {&step.decayed_key, &step.decayed_query}) *row = take(width);
        step.value = take(depth);
        return step;
    }

    void run(const Strand& strand);

  private:
    void prepare(const Strand& strand, int64_t t);
    void key_first(const Strand& strand, int64_t t, Rows from, Rows to) const;
    void value_first(const Strand& strand, int64_t t, Rows from, Rows to) const;
    template <int VECS> void columns(const Columns& of, int64_t v, int64_t left) const;
    template <int ROWS> void rows(const Columns& of, int64_t v) const;
    template <int VECS> void square(const Columns& of, int64_t v) const;
};

inline void Step::run(const Strand& strand) {
    const DeltaCall& call = strand.call;
    const int64_t rows = strand.state_rows(), row_width = strand.state_row_width();
    const Rows last{strand.last(), strand.last_stride()};
    Rows from = last;
    if (strand.count && call.state.data && call.state.dtype == FLOAT32) {
        from = {reinterpret_cast<float*>(const_cast<char*>(strand.state_row(0))), call.state.stride_row};
    } else if (!strand.in_place()) {
        for (int64_t r = 0; r < rows; r++) {
            if (call.state.data)
                copy_row(FloatDot{}, strand.state_row(r), call.state.dtype, row_width,
                         reinterpret_cast<char*>(last[r]));
            else std::fill(last[r], last[r] + row_width, 0.0f);
        }
    }
    for (int64_t t = 0; t < strand.count; t++) {
        prepare(strand, t);
        if (call.value_first) value_first(strand, t, from, last);
        else key_first(strand, t, from, last);
        from = last;
    }
}

inline void Step::prepare(const Strand& strand, int64_t t) {
    const DeltaCall& call = strand.call;
    token.read(strand, t);
    Token::read_row(strand.row(call.value, t), call.value.dtype, call.depth, round_up(call.depth, LANES), value);
    for (int64_t d = 0; d < call.width; d += LANES) {
        const Floats decay = load<Floats>(token.decay + d);
        store(decayed_key + d, load<Floats>(token.key + d) * decay);
        store(decayed_query + d, load<Floats>(token.query + d) * decay);
    }
}

// VECS vectors of value channels from v on, of which `left` are there. What is read is the updated state:
// (S + key u^T)^T query = S^T query + (key . query) u.
template <int VECS> void Step::columns(const Columns& of, int64_t v, int64_t left) const {
    const auto part = [&](const float* from, int n) K31_BODY {
        return VECS > 1 ? load<Floats>(from + n * LANES) : load_part(from, left);
    };
    const auto keep = [&](float* to, int n, Floats x) K31_BODY {
        if (VECS > 1) store(to + n * LANES, x);
        else store_part(to, x, left);
    };
    // Locals: what is stored might, for all the compiler knows, be the fields of this object.
    const Rows from = of.from, to = of.to;
    const int64_t width = of.width;
    const float *with_key = decayed_key, *with_query = decayed_query, *decays = token.decay, *keys = token.key;
    Floats by_key[VECS] = {}, by_query[VECS] = {};
    for (int64_t d = 0; d < width; d++) {
        const float* row = from[d] + v;
#pragma GCC unroll 8
        for (int n = 0; n < VECS; n++) {
            Floats state = part(row, n);
            K31_KEEP(state);
            by_key[n] += state * with_key[d];
            by_query[n] += state * with_query[d];
        }
    }
    Floats written[VECS];
#pragma GCC unroll 8
    for (int n = 0; n < VECS; n++) {
        written[n] = of.beta * (load<Floats>(value + v + n * LANES) - by_key[n]);
        keep(of.output + v, n, by_query[n] + of.overlap * written[n]);
    }
    for (int64_t d = 0; d < width; d++) {
        const float* row = from[d] + v;
        float* place = to[d] + v;
        const float decay = decays[d], key = keys[d];
        // The beginning of what lies behind this state, most often the next head's: memory would be idle meanwhile.
        if (VECS > WIDEST) prefetch_far(reinterpret_cast<const char*>(from[width]) + d * 128, 128);
#pragma GCC unroll 8
        for (int n = 0; n < VECS; n++) keep(place, n, part(row, n) * decay + key * written[n]);
    }
}

// State [width][depth].
inline void Step::key_first(const Strand& strand, int64_t t, Rows from, Rows to) const {
    const int64_t width = strand.call.width, depth = strand.call.depth;
    const Columns of{from, to, width, strand.beta(t), token.overlap(width), strand.output(t)};
    constexpr int64_t MOST = 2 * WIDEST * LANES;
    int64_t v = 0;
    for (; v + MOST <= depth; v += MOST) columns<2 * WIDEST>(of, v, MOST);
    if (v + MOST / 2 <= depth) {
        columns<WIDEST>(of, v, MOST / 2);
        v += MOST / 2;
    }
    for (; v < depth; v += LANES) columns<1>(of, v, depth - v);
}

// State [depth][width]: each of its rows is finished while it is in the nearest cache.
inline void Step::value_first(const Strand& strand, int64_t t, Rows from, Rows to) const {
    const int64_t width = strand.call.width, depth = strand.call.depth;
    const Columns of{from, to, width, strand.beta(t), token.overlap(width), strand.output(t)};
    int64_t v = 0;
    if constexpr (LANES == 16) {
        const auto block = width == 8 * LANES ? &Step::square<8> : width == 4 * LANES ? &Step::square<4> : nullptr;
        for (; block && v + LANES <= depth; v += LANES) (this->*block)(of, v);
    }
    for (; v + ROWS_TOGETHER <= depth; v += ROWS_TOGETHER) rows<ROWS_TOGETHER>(of, v);
    for (; v < depth; v++) rows<1>(of, v);
}

// ROWS value channels from v on, one row after the other as memory likes it best.
template <int ROWS> K31_INLINE void Step::rows(const Columns& of, int64_t v) const {
    const float *decay = token.decay, *key = token.key, *with_key = decayed_key, *with_query = decayed_query;
    const Rows from = of.from, to = of.to;
    Floats by_key[ROWS] = {}, by_query[ROWS] = {};
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++)
        over_row(of.width, [&](int64_t d, int64_t left) K31_BODY {
            Floats state = load_part(from[v + m] + d, left);
            K31_KEEP(state);
            by_key[m] += state * load<Floats>(with_key + d);
            by_query[m] += state * load<Floats>(with_query + d);
        });
    float written[ROWS];
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++) {
        written[m] = of.beta * (value[v + m] - sum_lanes(by_key[m]));
        of.output[v + m] = sum_lanes(by_query[m]) + of.overlap * written[m];
    }
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++)
        over_row(of.width, [&](int64_t d, int64_t left) K31_BODY {
            const Floats kept = load_part(from[v + m] + d, left) * load<Floats>(decay + d);
            store_part(to[v + m] + d, kept + written[m] * load<Floats>(key + d), left);
        });
}

// LANES rows of VECS whole vectors: the token's rows stay in registers, and no sum waits for another.
template <int VECS> void Step::square(const Columns& of, int64_t v) const {
    const Rows from = of.from, to = of.to;
    const auto held = [](const float* row, Floats (&parts)[VECS]) K31_BODY {
#pragma GCC unroll 8
        for (int n = 0; n < VECS; n++) {
            parts[n] = load<Floats>(row + n * LANES);
            K31_KEEP(parts[n]);
        }
    };
    Floats by_key[LANES], by_query[LANES], with_key[VECS], with_query[VECS];
    held(decayed_key, with_key);
    held(decayed_query, with_query);
    for (int m = 0; m < LANES; m++) {
        Floats for_key{}, for_query{};
#pragma GCC unroll 8
        for (int n = 0; n < VECS; n++) {
            Floats state = load<Floats>(from[v + m] + n * LANES);
            K31_KEEP(state);
            for_key += state * with_key[n];
            for_query += state * with_query[n];
        }
        by_key[m] = for_key;
        by_query[m] = for_query;
    }
    const Floats difference = of.beta * (load<Floats>(value + v) - sum_each(by_key));
    store(of.output + v, sum_each(by_query) + of.overlap * difference);
    float written[LANES];
    store(written, difference);
    Floats decays[VECS], keys[VECS];
    held(token.decay, decays);
    held(token.key, keys);
    for (int m = 0; m < LANES; m++) {
        const float *row = from[v + m], strength = written[m];
        float* place = to[v + m];
        prefetch_far(reinterpret_cast<const char*>(from[v + m + ROWS_AHEAD]), VECS * LANES * 4);
#pragma GCC unroll 8
        for (int n = 0; n < VECS; n++)
            store(place + n * LANES, load<Floats>(row + n * LANES) * decays[n] + strength * keys[n]);
    }
}

}  // namespace k31
