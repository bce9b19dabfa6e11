// k31::skinny_linear on the CPU: a few rows of x times a weight that comes from memory once and is read where it lies.
//
// Memory decides: several rows of the weight are read at once, and while they are, the rows after them are fetched to
// the second-level cache, since the processor does not see in time where rows begin. Depth runs across the lanes, in
// pairs of numbers; a sum's order depends on the depth alone, so a row's result does not depend on what is beside it.
#include <omp.h>

#include "numbers.h"
#include "skinny_linear_call.h"

namespace k31 {
namespace {

constexpr int64_t STEP = LANES * 2;                                // numbers that a vector of pairs holds
constexpr int SUMS = LANES == 16 ? 24 : 8;                         // that fit the registers beside their operands
constexpr int MOST_LINES = 8;
constexpr double OUTPUTS_WORTH_A_THREAD = 1 << 18;                 // numbers of the weight; less is no gain
template <int ROWS> constexpr int LINES = ROWS * MOST_LINES <= SUMS ? MOST_LINES : SUMS / ROWS;

K31_INLINE Floats add_pairs(Floats sum, Words one, Words other) {
#if defined(K31_PAIR_INSTRUCTION)
    return bits<Floats>(_mm512_dpbf16_ps(bits<__m512>(sum), bits<__m512bh>(one), bits<__m512bh>(other)));
#else
    sum += bits<Floats>(one << 16) * bits<Floats>(other << 16);
    return sum + bits<Floats>(one & 0xffff0000u) * bits<Floats>(other & 0xffff0000u);
#endif
}

// Up to STEP numbers, what is missing of them zero.
K31_INLINE Words load_pairs(const char* from, int64_t count) {
    if (count >= STEP) return load<Words>(from);
    Words part{};
    std::memcpy(&part, from, size_t(count) * 2);
    return part;
}

// The rows of x as [step][row][LANES] pairs: one stream, whatever lies between the rows.
void interleave_rows(const SkinnyCall& call, char* to) {
    for (int64_t d = 0; d < call.depth; d += STEP)
        for (int64_t row = 0; row < call.rows; row++, to += sizeof(Words))
            store(to, load_pairs(call.x.data + (row * call.x.stride_outer + d) * 2, call.depth - d));
}

template <int ROWS, int LINES_AT_ONCE> struct Group {
    Floats sums[LINES_AT_ONCE][ROWS];

    K31_INLINE void add(const char* line, int64_t pitch, const char* x, int64_t count) {
        Words row[ROWS];
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) row[m] = load<Words>(x + m * sizeof(Words));
#pragma GCC unroll 8
        for (int n = 0; n < LINES_AT_ONCE; n++) {
            const Words numbers = load_pairs(line + n * pitch, count);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) sums[n][m] = add_pairs(sums[n][m], numbers, row[m]);
        }
    }
};

// Outputs [first, first + LINES_AT_ONCE); the lines `ahead` bytes further are fetched meanwhile.
template <int ROWS, int LINES_AT_ONCE>
void multiply_lines(const SkinnyCall& call, const char* x, int64_t first, int64_t ahead) {
    const int64_t pitch = call.weight.stride_outer * 2;
    const char* line = call.weight.data + first * pitch;
    Group<ROWS, LINES_AT_ONCE> group{};
    int64_t d = 0;
    for (; d + STEP <= call.depth; d += STEP, line += STEP * 2, x += ROWS * sizeof(Words)) {
#pragma GCC unroll 8
        for (int n = 0; n < LINES_AT_ONCE; n++) __builtin_prefetch(line + n * pitch + ahead, 0, 2);
        group.add(line, pitch, x, STEP);
    }
    if (d < call.depth) group.add(line, pitch, x, call.depth - d);
    for (int n = 0; n < LINES_AT_ONCE; n++) {
        const int64_t output = first + n;
        const Operand& bias = call.bias;
        for (int m = 0; m < ROWS; m++) {
            float sum = sum_lanes(group.sums[n][m]);
            if (bias.data) sum += element_of(bias.data, bias.dtype, output * bias.stride_head);
            call.result[m * call.outputs + output] = narrow(sum);
        }
    }
}

template <int ROWS> void multiply(const SkinnyCall& call, const char* x, int64_t threads) {
    constexpr int64_t lines = LINES<ROWS>;
    const int64_t groups = call.outputs / lines, pitch = call.weight.stride_outer * 2;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) nowait
        for (int64_t group = 0; group < groups; group++)
            multiply_lines<ROWS, lines>(call, x, group * lines, group + 1 < groups ? lines * pitch : 0);
#pragma omp for schedule(static)
        for (int64_t output = groups * lines; output < call.outputs; output++)
            multiply_lines<ROWS, 1>(call, x, output, 0);
    }
}

int64_t run(const SkinnyCall& call) {
    using Form = void (*)(const SkinnyCall&, const char*, int64_t);
    static constexpr Form forms[MOST_ROWS] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>,
                                              multiply<5>, multiply<6>, multiply<7>, multiply<8>};
    const Scratch scratch(round_up(call.depth, STEP) * 2 * call.rows);
    if (!scratch) return NO_MEMORY;
    interleave_rows(call, scratch.base());
    const bool small = double(call.outputs) * double(call.depth) < OUTPUTS_WORTH_A_THREAD;
    forms[call.rows - 1](call, scratch.base(), small ? 1 : std::max<int64_t>(call.threads, 1));
    return OK;
}

}  // namespace
}  // namespace k31

K31_EXPORT int64_t k31_skinny_linear_size() { return sizeof(k31::SkinnyCall); }

K31_EXPORT int64_t k31_skinny_linear(k31::SkinnyCall* call) { return k31::run(*call); }
