// The delta rule token by token: a step brings the state near once, reads it there once more, and writes it once.
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
    const float *by_key = decayed_key + d, *by_query = decayed_query + d;
    float *key_sum = predicted, *query_sum = read;
    over_row(depth, [&](int64_t v, int64_t left) K31_BODY {
        Floats for_key = load<Floats>(key_sum + v), for_query = load<Floats>(query_sum + v);
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++) {
            const Floats state = load_part(from + (d + m) * stride + v, left);
            for_key += state * by_key[m];
            for_query += state * by_query[m];
        }
        store(key_sum + v, for_key);
        store(query_sum + v, for_query);
    });
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
    float *output = strand.output(t), *written = update;
    over_row(depth, [&](int64_t v, int64_t left) K31_BODY {
        const Floats difference = beta * (load<Floats>(value + v) - load<Floats>(predicted + v));
        store(written + v, difference);
        store_part(output + v, load<Floats>(read + v) + overlap * difference, left);
    });
    for (d = 0; d < width; d++) {
        const float decay = token.decay[d], key = token.key[d];
        const float* row = from + d * stride;
        over_row(depth, [&](int64_t v, int64_t left) K31_BODY {
            store_part(to + d * depth + v, load_part(row + v, left) * decay + key * load<Floats>(written + v), left);
        });
    }
}

// State [depth][width]: each of its rows is finished while it is in the nearest cache.
inline void Step::value_first(const Strand& strand, int64_t t, const float* from, int64_t stride, float* to) {
    const int64_t width = strand.call.width, depth = strand.call.depth;
    const float beta = strand.beta(t), overlap = token.overlap(width);
    const float *decay = token.decay, *key = token.key, *by_key = decayed_key, *by_query = decayed_query;
    float* output = strand.output(t);
    for (int64_t v = 0; v < depth; v++) {
        const float* row = from + v * stride;
        Floats for_key{}, for_query{};
        over_row(width, [&](int64_t d, int64_t left) K31_BODY {
            const Floats state = load_part(row + d, left);
            for_key += state * load<Floats>(by_key + d);
            for_query += state * load<Floats>(by_query + d);
        });
        const float written = beta * (value[v] - sum_lanes(for_key));
        output[v] = sum_lanes(for_query) + overlap * written;
        over_row(width, [&](int64_t d, int64_t left) K31_BODY {
            const Floats kept = load_part(row + d, left) * load<Floats>(decay + d);
            store_part(to + v * width + d, kept + written * load<Floats>(key + d), left);
        });
    }
}

}  // namespace k31
