// The delta rule by chunks of CHUNK tokens (K3.1 spec 2.5). The state stays in scratch, in panels of COLUMNS value
// channels, so that everything after the products of keys with keys is a small matrix product in the nearest cache.
//
// A decay between two tokens is a product of decays or exp of a sum of gates, never exp of a difference of two sums:
// no factor overflows, strong gates lose nothing, and a gate of -inf forgets its channel and no more.
#pragma once
#include "delta_call.h"

namespace k31 {

constexpr int CHUNK = 16;  // a multiple of every LANES
constexpr int CHUNK_ROWS = 4;
constexpr int CHUNK_VECS = WIDEST;
constexpr int COLUMNS = CHUNK_VECS * LANES;
constexpr int64_t AHEAD = 2;  // tokens between fetching a row and using it
using Panel = Floats[CHUNK_VECS];  // one token's numbers in a panel

struct Chunk {
    Token token;
    float* gate_sum;     // [width] gates added up so far
    float* from_start;   // [width] decay from the chunk's start up to the present token
    float* gate_rows;    // [CHUNK][width]
    float* key_rows;     // [CHUNK][width], in the end times the decay from their token up to the chunk's end
    float* addresses;    // [2 * CHUNK][width] keys, then queries, times the decay from the chunk's start
    float* keys;         // [width][CHUNK] keys times the decay from their token up to the present one
    float* values;       // [CHUNK][columns]
    float* state;        // [columns / COLUMNS][width][COLUMNS]
    float* overlap;      // [CHUNK][CHUNK] key i . decayed key j, for j < i
    float* readout;      // [CHUNK][CHUNK] query i . decayed key j, for j <= i
    float* beta;         // [CHUNK]
    int64_t width, columns;  // rounded up: vectors of channels, panels of value channels

    static Chunk carve(Carver& from, const DeltaCall& call) {
        const int64_t width = round_up(call.width, LANES), columns = round_up(call.depth, COLUMNS);
        const auto take = [&](int64_t count) { return from.take<float>(count); };
        Chunk chunk{Token::carve(from, call.width)};
        chunk.gate_sum = take(width);
        chunk.from_start = take(width);
        chunk.gate_rows = take(CHUNK * width);
        chunk.key_rows = take(CHUNK * width);
        chunk.addresses = take(2 * CHUNK * width);
        chunk.keys = take(width * CHUNK);
        chunk.values = take(CHUNK * columns);
        chunk.state = take(width * columns);
        chunk.overlap = take(CHUNK * CHUNK);
        chunk.readout = take(CHUNK * CHUNK);
        chunk.beta = take(CHUNK);
        chunk.width = width;
        chunk.columns = columns;
        return chunk;
    }

    void run(const Strand& strand) {
        load_state(strand);
        std::fill(keys, keys + width * CHUNK, 0.0f);
        for (int64_t t = 0; t < strand.count; t += CHUNK) {
            const int64_t n = std::min<int64_t>(CHUNK, strand.count - t);
            for (int64_t i = 0; i < n; i++) take_token(strand, t + i, i, n);
            decay_to_end(n);
            for (int64_t column = 0; column < columns; column += COLUMNS) advance_panel(strand, t, n, column);
        }
        store_state(strand);
    }

  private:
    void take_token(const Strand& strand, int64_t t, int64_t i, int64_t n);
    void decay_keys(int64_t i);
    void decay_to_end(int64_t n);
    void advance_panel(const Strand& strand, int64_t t, int64_t n, int64_t column);
    void solve(const Panel* predicted, int64_t n, int64_t column, Panel* update) const;
    void read(const Panel& from_state, const Panel* update, int64_t i, float* output, int64_t left) const;
    void move_state(float* here, const Panel* update, int64_t n) const;
    void load_state(const Strand& strand);
    void store_state(const Strand& strand) const;
    float* panel(int64_t column) const { return state + column * width; }
    float* number(int64_t d, int64_t v) const { return panel(v / COLUMNS * COLUMNS) + d * COLUMNS + v % COLUMNS; }
};

// Token i of n: its rows, and its products with the keys of the chunk before it.
inline void Chunk::take_token(const Strand& strand, int64_t t, int64_t i, int64_t n) {
    const DeltaCall& call = strand.call;
    strand.expect(t + AHEAD);
    token.gate = gate_rows + i * width;
    token.key = key_rows + i * width;
    token.read(strand, t);
    Token::read_row(strand.row(call.value, t), call.value.dtype, call.depth, columns, values + i * columns);
    beta[i] = strand.beta(t);
    for (int64_t d = 0; d < width; d += LANES) {
        const Floats gate = load<Floats>(token.gate + d), sum = i ? load<Floats>(gate_sum + d) + gate : gate;
        const Floats since = exp_any(sum);
        store(gate_sum + d, sum);
        store(from_start + d, since);
        store(addresses + i * width + d, load<Floats>(token.key + d) * since);
        store(addresses + (n + i) * width + d, load<Floats>(token.query + d) * since);
    }
    decay_keys(i);
    readout[i * CHUNK + i] = token.overlap(width);
    for (int64_t d = 0; d < width; d++) keys[d * CHUNK + i] = token.key[d];
}

// Tokens lie across the lanes, so no sum crosses them; lanes of tokens that are still to come hold what is not read.
inline void Chunk::decay_keys(int64_t i) {
    constexpr int CHAINS = 4;  // divides every LANES, and so the width; one chain of additions would wait for itself
    for (int64_t j = 0; j < i; j += LANES) {
        Floats by_key[CHAINS] = {}, by_query[CHAINS] = {};
        for (int64_t d = 0; d < width; d += CHAINS)
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; c++) {
                float* place = keys + (d + c) * CHUNK + j;
                const Floats decayed = load<Floats>(place) * token.decay[d + c];
                store(place, decayed);
                by_key[c] += decayed * token.key[d + c];
                by_query[c] += decayed * token.query[d + c];
            }
        store(overlap + i * CHUNK + j, (by_key[0] + by_key[1]) + (by_key[2] + by_key[3]));
        store(readout + i * CHUNK + j, (by_query[0] + by_query[1]) + (by_query[2] + by_query[3]));
    }
}

// Of n tokens, each key row times the decay by the tokens after it.
inline void Chunk::decay_to_end(int64_t n) {
    std::fill(gate_sum, gate_sum + width, 0.0f);
    for (int64_t j = n - 2; j >= 0; j--)
        for (int64_t d = 0; d < width; d += LANES) {
            const Floats sum = load<Floats>(gate_sum + d) + load<Floats>(gate_rows + (j + 1) * width + d);
            store(gate_sum + d, sum);
            store(key_rows + j * width + d, load<Floats>(key_rows + j * width + d) * exp_any(sum));
        }
}

// COLUMNS value channels of the chunk: predict from the state, solve for what is written, read, move the state on.
inline void Chunk::advance_panel(const Strand& strand, int64_t t, int64_t n, int64_t column) {
    Panel products[2 * CHUNK] = {}, update[CHUNK];
    const char* rows[2 * CHUNK];
    for (int64_t r = 0; r < 2 * CHUNK; r++)
        rows[r] = reinterpret_cast<const char*>(addresses + std::min(r, 2 * n - 1) * width);
    for (int64_t r = 0; r < 2 * n; r += CHUNK_ROWS)
        dot_tile<FloatDot>(rows + r, strand.call.width, panel(column),
                           reinterpret_cast<Panel(&)[CHUNK_ROWS]>(products[r]));
    solve(products, n, column, update);
    float* output = strand.output(t) + column;
    const int64_t step = strand.call.heads * strand.call.depth;
    for (int64_t i = 0; i < n; i++) read(products[n + i], update, i, output + i * step, strand.call.depth - column);
    move_state(panel(column), update, n);
}

// update_j = beta_j * (value_j - predicted_j), where the writes of the tokens before j count too.
inline void Chunk::solve(const Panel* predicted, int64_t n, int64_t column, Panel* update) const {
    const float *strength = beta, *weights = overlap, *wanted = values + column;
    // Summed for themselves and added once: one by one, each sum would be rounded at the state's magnitude.
    Panel written[CHUNK] = {};
    for (int64_t j = 0; j < n; j++) {
        for (int v = 0; v < CHUNK_VECS; v++) {
            const Floats value = load<Floats>(wanted + j * columns + v * LANES);
            update[j][v] = strength[j] * (value - predicted[j][v] - written[j][v]);
        }
        for (int64_t i = j + 1; i < n; i++)
            for (int v = 0; v < CHUNK_VECS; v++) written[i][v] += weights[i * CHUNK + j] * update[j][v];
    }
}

// What token i reads: the state at the chunk's start, and what was written up to and with itself.
inline void Chunk::read(const Panel& from_state, const Panel* update, int64_t i, float* output, int64_t left) const {
    const float* weights = readout + i * CHUNK;
    Panel written = {};
    for (int64_t j = 0; j <= i; j++)
        for (int v = 0; v < CHUNK_VECS; v++) written[v] += weights[j] * update[j][v];
    for (int64_t v = 0; v < CHUNK_VECS && v * LANES < left; v++)
        store_part(output + v * LANES, from_state[v] + written[v], left - v * LANES);
}

inline void Chunk::move_state(float* here, const Panel* update, int64_t n) const {
    const float *kept = from_start, *writing = key_rows;
    for (int64_t d = 0; d < width; d += CHUNK_ROWS) {
        Panel written[CHUNK_ROWS] = {};
        const char* rows[CHUNK_ROWS];
        for (int m = 0; m < CHUNK_ROWS; m++) rows[m] = reinterpret_cast<const char*>(writing + d + m);
        dot_tile<FloatDot, CHUNK_ROWS, CHUNK_VECS, true>(rows, n, reinterpret_cast<const float*>(update), written,
                                                         width * 4);
        for (int m = 0; m < CHUNK_ROWS; m++)
            for (int v = 0; v < CHUNK_VECS; v++) {
                float* place = here + (d + m) * COLUMNS + v * LANES;
                store(place, load<Floats>(place) * kept[d + m] + written[m][v]);
            }
    }
}

inline void Chunk::load_state(const Strand& strand) {
    const DeltaCall& call = strand.call;
    std::fill(state, state + width * columns, 0.0f);
    if (!call.state.data) return;
    if (call.value_first) {
        for (int64_t v = 0; v < call.depth; v++) {
            copy_row(FloatDot{}, strand.state_row(v), call.state.dtype, call.width,
                     reinterpret_cast<char*>(from_start));
            for (int64_t d = 0; d < call.width; d++) *number(d, v) = from_start[d];
        }
        return;
    }
    for (int64_t v = 0; v < call.depth; v += COLUMNS)
        for (int64_t d = 0; d < call.width; d++)
            copy_row(FloatDot{}, strand.state_row(d) + v * size_of(call.state.dtype), call.state.dtype,
                     std::min<int64_t>(COLUMNS, call.depth - v), reinterpret_cast<char*>(number(d, v)));
}

inline void Chunk::store_state(const Strand& strand) const {
    const int64_t rows = strand.call.width, depth = strand.call.depth, stride = strand.last_stride();
    float* last = strand.last();
    if (strand.call.value_first) {
        for (int64_t v = 0; v < depth; v++)
            for (int64_t d = 0; d < rows; d++) last[v * stride + d] = *number(d, v);
        return;
    }
    for (int64_t d = 0; d < rows; d++)
        over_row(depth, [&](int64_t v, int64_t left) K31_BODY {
            store_part(last + d * stride + v, load<Floats>(number(d, v)), left);
        });
}

}  // namespace k31
