// The delta rule token by token: each step reads the state once or twice while it is near, and writes it once.
#pragma once
#include "delta_call.h"

namespace k31 {

struct Step {
    Token token;
    float *decayed_key, *decayed_query;         // [width]
    float *value, *predicted, *read, *update;   // [depth]

    static Step carve(Carver& from, const DeltaCall& call) {
        const int64_t width = round_up(call.width, LANES), depth = round_up(call.depth, LANES);
        const auto take = [&](int64_t count) { return from.take<float>(count); };
        Step step{Token::carve(from, call.width)};
        for (float** row : {&step.decayed_key, &step.decayed_query}) *row = take(width);
        for (float** row : {&step.value, &step.predicted, &step.read, &step.update}) *row = take(depth);
        return step;
    }

    void run(const Strand& strand);

  private:
    void prepare(const Strand& strand, int64_t t);
    void key_first(const Strand& strand, int64_t t, const float* from, int64_t stride, float* to);
    void value_first(const Strand& strand, int64_t t, const float* from, int64_t stride, float* to);
    template <int ROWS> void accumulate(int64_t depth, int64_t d, const float* from, int64_t stride);
};

inline void Step::run(const Strand& strand) {
    const DeltaCall& call = strand.call;
    const int64_t rows = strand.state_rows(), row_width = strand.state_row_width();
    const float* from = strand.last();
    int64_t stride = row_width;
    if (strand.count && call.state.data && call.state.dtype == FLOAT32) {
        from = reinterpret_cast<const float*>(strand.state_row(0));
        stride = call.state.stride_row;
    } else if (call.state.data) {
        for (int64_t r = 0; r < rows; r++)
            copy_row(FloatDot{}, strand.state_row(r), call.state.dtype, row_width,
                     reinterpret_cast<char*>(strand.last() + r * row_width));
    } else {
        std::fill(strand.last(), strand.last() + rows * row_width, 0.0f);
    }
    for (int64_t t = 0; t < strand.count; t++) {
        prepare(strand, t);
        if (call.value_first) value_first(strand, t, from, stride, strand.last());
        else key_first(strand, t, from, stride, strand.last());
        from = strand.last();
        stride = row_width;
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

// predicted += sum of decayed_key[d] * state[d], read += sum of decayed_query[d] * state[d], for ROWS rows from d on.
template <int ROWS> void Step::accumulate(int64_t depth, int64_t d, const float* from, int64_t stride) {
    for (int64_t v = 0; v < depth; v += LANES) {
        Floats by_key = load<Floats>(predicted + v), by_query = load<Floats>(read + v);
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++) {
            const Floats state = load_part(from + (d + m) * stride + v, depth - v);
            by_key += state * decayed_key[d + m];
            by_query += state * decayed_query[d + m];
        }
        store(predicted + v, by_key);
        store(read + v, by_query);
    }
}

// State [width][depth]. What is read is the updated state: (S + key u^T)^T query = S^T query + (key . query) u.
inline void Step::key_first(const Strand& strand, int64_t t, const float* from, int64_t stride, float* to) {
    const int64_t width = strand.call.width, depth = strand.call.depth;
    const float beta = strand.beta(t), overlap = token.overlap(width);
    std::fill(predicted, predicted + round_up(depth, LANES), 0.0f);
    std::fill(read, read + round_up(depth, LANES), 0.0f);
    int64_t d = 0;
    for (; d + 4 <= width; d += 4) accumulate<4>(depth, d, from, stride);
    for (; d < width; d++) accumulate<1>(depth, d, from, stride);
    float* output = strand.output(t);
    for (int64_t v = 0; v < depth; v += LANES) {
        const Floats written = beta * (load<Floats>(value + v) - load<Floats>(predicted + v));
        store(update + v, written);
        store_part(output + v, load<Floats>(read + v) + overlap * written, depth - v);
    }
    for (d = 0; d < width; d++)
        for (int64_t v = 0; v < depth; v += LANES) {
            const Floats kept = load_part(from + d * stride + v, depth - v) * token.decay[d];
            store_part(to + d * depth + v, kept + token.key[d] * load<Floats>(update + v), depth - v);
        }
}

// State [depth][width]: each of its rows is finished while it is in the nearest cache.
inline void Step::value_first(const Strand& strand, int64_t t, const float* from, int64_t stride, float* to) {
    const int64_t width = strand.call.width, depth = strand.call.depth;
    const float beta = strand.beta(t), overlap = token.overlap(width);
    float* output = strand.output(t);
    for (int64_t v = 0; v < depth; v++) {
        const float* row = from + v * stride;
        Floats by_key{}, by_query{};
        for (int64_t d = 0; d < width; d += LANES) {
            const Floats state = load_part(row + d, width - d);
            by_key += state * load<Floats>(decayed_key + d);
            by_query += state * load<Floats>(decayed_query + d);
        }
        const float written = beta * (value[v] - sum_lanes(by_key));
        output[v] = sum_lanes(by_query) + overlap * written;
        for (int64_t d = 0; d < width; d += LANES) {
            const Floats kept = load_part(row + d, width - d) * load<Floats>(token.decay + d);
            store_part(to + v * width + d, kept + written * load<Floats>(token.key + d), width - d);
        }
    }
}

}  // namespace k31
