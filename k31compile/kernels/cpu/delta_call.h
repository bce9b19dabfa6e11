// What a call of the delta rule names, one sequence of one head of it, and the rows of a token as the arithmetic
// wants them.
#pragma once
#include <algorithm>

#include "cache.h"
#include "tile.h"

namespace k31 {

struct DeltaCall {
    Operand query;
    Operand key;
    Operand value;
    Operand gate;
    Operand beta;
    Operand state;          // [sequence, row, head, number], as it is laid out; null: zeros
    const int64_t* limits;  // null: each request is one sequence
    int64_t sequences;
    int64_t tokens;
    int64_t heads;
    int64_t width;          // numbers of a key
    int64_t depth;          // numbers of a value
    int64_t scalar_gate;    // the gate's number stands for all channels
    int64_t value_first;    // states are [depth][width]
    int64_t by_chunk;
    double scale;
    int64_t threads;
    float* output;          // [request][token][head][depth]
    float* last;            // [sequence][head], then as value_first says; null: in place of the state, which is float32
    const int64_t* places;  // which of the states is a sequence's, from 0; null: the one of its number
};

// One sequence of one head.
struct Strand {
    const DeltaCall& call;
    int64_t sequence, head, request, first, count, place;

    Strand(const DeltaCall& of, int64_t number)
        : call(of), sequence(number / of.heads), head(number % of.heads), request(of.limits ? 0 : sequence),
          first(of.limits ? of.limits[sequence] : 0),
          count(of.limits ? of.limits[sequence + 1] - first : of.tokens),
          place(of.places ? of.places[sequence] : sequence) {}

    const char* row(const Operand& from, int64_t token) const {
        const int64_t at =
            request * from.stride_outer + (first + token) * from.stride_row + head * from.stride_head;
        return from.data + at * size_of(from.dtype);
    }
    const char* state_row(int64_t row) const {
        const Operand& from = call.state;
        const int64_t at = place * from.stride_outer + row * from.stride_row + head * from.stride_head;
        return from.data + at * size_of(from.dtype);
    }
    // Fetch the rows of a token that is needed soon.
    void expect(int64_t token) const {
        if (token >= count) return;
        for (const Operand* x : {&call.query, &call.key, &call.value, &call.gate})
            prefetch(row(*x, token), (x == &call.value ? call.depth : call.width) * size_of(x->dtype));
    }
    float* output(int64_t token) const {
        return call.output + ((request * call.tokens + first + token) * call.heads + head) * call.depth;
    }
    bool in_place() const { return !call.last; }
    float* last() const {
        if (in_place()) return reinterpret_cast<float*>(const_cast<char*>(state_row(0)));
        return call.last + (sequence * call.heads + head) * call.width * call.depth;
    }
    int64_t last_stride() const { return in_place() ? call.state.stride_row : state_row_width(); }
    float beta(int64_t token) const { return element_of(row(call.beta, token), call.beta.dtype, 0); }
    int64_t state_rows() const { return call.value_first ? call.depth : call.width; }
    int64_t state_row_width() const { return call.value_first ? call.width : call.depth; }
};

// The rows of one token in float32, zero from their end up to a whole vector; `query` is scaled already, `decay` is
// exp(gate).
struct Token {
    float *query, *key, *gate, *decay;

    static Token carve(Carver& from, int64_t width) {
        const int64_t lanes = round_up(width, LANES);
        return {from.take<float>(lanes), from.take<float>(lanes), from.take<float>(lanes), from.take<float>(lanes)};
    }

    void read(const Strand& strand, int64_t token) {
        const DeltaCall& call = strand.call;
        const int64_t lanes = round_up(call.width, LANES);
        read_row(strand.row(call.query, token), call.query.dtype, call.width, lanes, query);
        read_row(strand.row(call.key, token), call.key.dtype, call.width, lanes, key);
        const char* gates = strand.row(call.gate, token);
        if (call.scalar_gate) {
            const float shared = element_of(gates, call.gate.dtype, 0);
            std::fill(gate, gate + lanes, shared);
            std::fill(decay, decay + lanes, exp_any(splat(shared))[0]);
        } else {
            read_row(gates, call.gate.dtype, call.width, lanes, gate);
            for (int64_t d = 0; d < lanes; d += LANES) store(decay + d, exp_any(load<Floats>(gate + d)));
        }
        for (int64_t d = 0; d < lanes; d += LANES) store(query + d, load<Floats>(query + d) * float(call.scale));
    }

    float overlap(int64_t width) const {
        Floats sum{};
        for (int64_t d = 0; d < width; d += LANES) sum += load<Floats>(query + d) * load<Floats>(key + d);
        return sum_lanes(sum);
    }

    static void read_row(const char* from, int64_t dtype, int64_t width, int64_t lanes, float* to) {
        copy_row(FloatDot{}, from, dtype, width, reinterpret_cast<char*>(to));
        std::fill(to + width, to + lanes, 0.0f);
    }
};

}  // namespace k31
