// Which tokens go to which expert: the pairs of token and expert sorted by expert, cut into blocks of one expert each.
// The cut follows from the call alone, never from the number of threads.
#pragma once
#include <algorithm>

#include "expert_products.h"

namespace k31 {

struct ExpertsCall {
    Operand x;        // [row, number]: strides outer and row, as for weights [row, slot]
    Operand weights;
    const char* indices;
    int64_t index_bytes;
    int64_t index_stride_row;
    int64_t index_stride_slot;
    Matrices gate;
    Matrices up;
    Matrices down;
    int64_t rows;
    int64_t slots;
    int64_t experts;
    int64_t width;
    int64_t inner;
    int64_t result_width;
    int64_t situ;
    double beta;
    double linear_beta;  // 0: up stays as it is
    int64_t threads;
    float* result;

    // The expert of a slot, -1 when it names none.
    int64_t expert(int64_t row, int64_t slot) const {
        const char* at = indices + (row * index_stride_row + slot * index_stride_slot) * index_bytes;
        const int64_t index = index_bytes == 8 ? read<int64_t>(at) : read<int32_t>(at);
        return index >= 0 && index < experts ? index : -1;
    }
    float weight(int64_t row, int64_t slot) const {
        return element_of(weights.data, weights.dtype, row * weights.stride_outer + slot * weights.stride_row);
    }
};

// Whether gate and up multiply pairs of bfloat16: then tokens across the lanes are packed as pairs.
inline bool reads_pairs(const ExpertsCall& call) {
    return PAIRS && call.x.dtype == BFLOAT16 && call.gate.dtype == BFLOAT16 && call.up.dtype == BFLOAT16 &&
           !call.gate.transposed() && !call.up.transposed();
}

// Whether the activation is rounded to bfloat16 before down, as it is in a model of that dtype.
inline bool rounds(const ExpertsCall& call) {
    return call.x.dtype == BFLOAT16 && call.gate.dtype == BFLOAT16 && call.up.dtype == BFLOAT16 &&
           call.down.dtype == BFLOAT16;
}

// Whether down multiplies pairs of bfloat16: then activations with tokens across the lanes are kept as pairs.
inline bool keeps_pairs(const ExpertsCall& call) { return PAIRS && rounds(call) && !call.down.transposed(); }

struct Pair {
    int32_t row;
    float weight;
};

struct ExpertBlock {
    int64_t expert;
    const Pair* pairs;
    int64_t tokens;
    int64_t hidden;  // how many inner activations the blocks before it have

    int64_t lanes() const { return round_up(tokens, LANES); }
};

constexpr int64_t MOST_TOKENS = 64;
constexpr int64_t BLOCK_BYTES = 5 << 18;  // what the activations of a block may take

inline int64_t tokens_per_block(const ExpertsCall& call) {
    const int64_t bytes = (2 * call.width + call.inner) * 4;
    return std::clamp<int64_t>(BLOCK_BYTES / bytes / LANES * LANES, LANES, MOST_TOKENS);
}

struct Routing {
    int64_t* ends;   // [experts + 1]: first the counts, then where each expert's pairs end
    Pair* pairs;     // by expert; those of one expert by row, then by slot
    ExpertBlock* blocks;  // [count + 1]: the last one says only where it would lie
    int64_t count = 0;

    static Routing carve(Carver& from, const ExpertsCall& call) {
        const int64_t pairs = call.rows * call.slots;
        const int64_t blocks = std::min(pairs, call.experts) + pairs / tokens_per_block(call);
        return {from.take<int64_t>(call.experts + 1), from.take<Pair>(pairs), from.take<ExpertBlock>(blocks + 1)};
    }

    void sort(const ExpertsCall& call) {
        std::fill(ends, ends + call.experts + 1, 0);
        for_slots(call, [&](int64_t expert, int64_t, int64_t) { ends[expert + 1]++; });
        for (int64_t e = 0; e < call.experts; e++) ends[e + 1] += ends[e];
        for_slots(call, [&](int64_t expert, int64_t row, int64_t slot) {
            pairs[ends[expert]++] = {int32_t(row), call.weight(row, slot)};
        });
        cut(call);
    }

    // How many inner activations the blocks from `first` on have until `end`.
    int64_t hidden(int64_t first, int64_t end) const { return blocks[end].hidden - blocks[first].hidden; }

  private:
    void cut(const ExpertsCall& call) {
        const int64_t most = tokens_per_block(call);
        int64_t hidden = 0, from = 0;
        for (int64_t e = 0; e < call.experts; from = ends[e++])
            for (; from < ends[e]; from += most) {
                const ExpertBlock& block = blocks[count++] = {e, pairs + from, std::min(most, ends[e] - from), hidden};
                hidden += (by_lanes(call.down.transposed(), block.tokens) ? block.lanes() : block.tokens) * call.inner;
            }
        blocks[count].hidden = hidden;
    }

    template <class F> static void for_slots(const ExpertsCall& call, F f) {
        for (int64_t row = 0; row < call.rows; row++)
            for (int64_t slot = 0; slot < call.slots; slot++)
                if (const int64_t expert = call.expert(row, slot); expert >= 0) f(expert, row, slot);
    }
};

}  // namespace k31
