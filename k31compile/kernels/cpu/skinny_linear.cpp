// k31::skinny_linear on the CPU: a few rows of x times a weight that comes from memory once and is read where it lies; more
// rows than MOST_ROWS are many_rows.h's.
//
// Memory decides: several rows of the weight are read at once, and while they are, what is read after them is fetched to
// the second-level cache, since the processor does not see in time where rows begin. Where x is too large for the
// first-level cache, the depth is cut into pieces, and a piece of x serves some groups of rows before the next one is
// loaded. Depth runs across the lanes; a sum's order depends on the depth alone, so a row's result does not depend on
// what is beside it.
#include <omp.h>

#include "many_rows.h"
#include "numbers.h"
#include "skinny_linear_call.h"

namespace k31 {
namespace {

constexpr int SUMS = LANES == 16 ? 24 : 8;          // that fit the registers beside their operands
constexpr int MOST_LINES = 8;
constexpr int64_t GROUPS = 4;                       // of lines that a piece of x serves
constexpr int64_t PIECE_BYTES = 16 << 10;           // of x: half of a small first-level cache
constexpr double OUTPUTS_WORTH_A_THREAD = 1 << 18;  // numbers of the weight; less is no gain
template <int ROWS> constexpr int LINES = ROWS * MOST_LINES <= SUMS ? MOST_LINES : SUMS / ROWS;

// A vector of bfloat16 numbers, two to a lane.
struct Pairs {
    static constexpr int64_t SIZE = 2, STEP = LANES * 2;
    static K31_INLINE Floats add(Floats sum, Words one, Words other) { return PairDot::step(sum, one, other); }
    static K31_INLINE void put(char* result, int64_t at, float sum) { store(result + at * SIZE, narrow(sum)); }
};

struct Singles {
    static constexpr int64_t SIZE = 4, STEP = LANES;
    static K31_INLINE Floats add(Floats sum, Words one, Words other) { return FloatDot::step(sum, one, other); }
    static K31_INLINE void put(char* result, int64_t at, float sum) { store(result + at * SIZE, sum); }
};

// Up to a whole vector of numbers, what is missing of them zero.
template <class Numbers> K31_INLINE Words load_numbers(const char* from, int64_t count) {
    if (count >= Numbers::STEP) return load<Words>(from);
    Words part{};
    std::memcpy(&part, from, size_t(count * Numbers::SIZE));
    return part;
}

// The rows of x as [step][row] vectors: one stream, whatever lies between the rows.
template <class Numbers> void interleave_rows(const SkinnyCall& call, char* to) {
    for (int64_t d = 0; d < call.depth; d += Numbers::STEP)
        for (int64_t row = 0; row < call.rows; row++, to += sizeof(Words)) {
            const char* from = call.x.data + (row * call.x.stride_outer + d) * Numbers::SIZE;
            store(to, load_numbers<Numbers>(from, call.depth - d));
        }
}

// The fewer of both operands stay in registers while the others pass: the sums leave no room for all of them.
template <class Numbers, int ROWS, int LINES_AT_ONCE>
K31_INLINE void add_step(const char* line, int64_t pitch, const char* x, int64_t count,
                         Floats (&sums)[LINES_AT_ONCE][ROWS]) {
    constexpr bool HOLD_ROWS = ROWS < LINES_AT_ONCE;
    constexpr int HELD = HOLD_ROWS ? ROWS : LINES_AT_ONCE, PASSING = HOLD_ROWS ? LINES_AT_ONCE : ROWS;
    const auto row = [&](int m) { return load<Words>(x + m * sizeof(Words)); };
    const auto numbers = [&](int n) { return load_numbers<Numbers>(line + n * pitch, count); };
    Words held[HELD];
#pragma GCC unroll 8
    for (int h = 0; h < HELD; h++) {
        held[h] = HOLD_ROWS ? row(h) : numbers(h);
        K31_KEEP(held[h]);
    }
#pragma GCC unroll 8
    for (int p = 0; p < PASSING; p++) {
        Words passing = HOLD_ROWS ? numbers(p) : row(p);
        K31_KEEP(passing);  // else it is loaded again for each product
#pragma GCC unroll 8
        for (int h = 0; h < HELD; h++) {
            Floats& sum = HOLD_ROWS ? sums[p][h] : sums[h][p];
            sum = Numbers::add(sum, passing, held[h]);
        }
    }
}

// kept[line][row] (+)= line . row over one piece of depth; what lies `ahead` bytes further is fetched meanwhile.
template <class Numbers, int ROWS, int LINES_AT_ONCE>
void add_piece(const char* line, int64_t pitch, const char* x, int64_t width, int64_t ahead, bool more, Floats* kept) {
    Floats sums[LINES_AT_ONCE][ROWS];
#pragma GCC unroll 8
    for (int n = 0; n < LINES_AT_ONCE; n++)
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) sums[n][m] = more ? kept[n * ROWS + m] : Floats{};
    int64_t d = 0;
    for (; d + Numbers::STEP <= width; d += Numbers::STEP, line += sizeof(Words), x += ROWS * sizeof(Words)) {
#pragma GCC unroll 8
        for (int n = 0; n < LINES_AT_ONCE; n++) __builtin_prefetch(line + n * pitch + ahead, 0, 2);
        add_step<Numbers, ROWS, LINES_AT_ONCE>(line, pitch, x, Numbers::STEP, sums);
    }
    if (d < width) add_step<Numbers, ROWS, LINES_AT_ONCE>(line, pitch, x, width - d, sums);
#pragma GCC unroll 8
    for (int n = 0; n < LINES_AT_ONCE; n++)
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) kept[n * ROWS + m] = sums[n][m];
}

// Outputs [first, first + count), at most GROUPS * LINES of them.
template <class Numbers, int ROWS>
void multiply_block(const SkinnyCall& call, const char* x, int64_t piece, int64_t first, int64_t count) {
    constexpr int64_t lines = LINES<ROWS>;
    const int64_t pitch = call.weight.stride_outer * Numbers::SIZE, groups = count / lines;
    const char* weight = call.weight.data + first * pitch;
    Floats sums[round_up(GROUPS * lines * ROWS, LANES)] = {};
    for (int64_t d = 0; d < call.depth; d += piece) {
        const int64_t width = std::min(piece, call.depth - d), next = std::min(piece, call.depth - d - width);
        const char *at = weight + d * Numbers::SIZE, *row = x + d / Numbers::STEP * ROWS * sizeof(Words);
        // After the last group its lines of the next piece, or of the next block: both begin at a distance from here.
        const int64_t back = next ? width * Numbers::SIZE - (groups - 1) * lines * pitch
                                  : count * pitch - (groups - 1) * lines * pitch - d * Numbers::SIZE;
        const bool is_last = !next && first + count >= call.outputs;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t ahead = g + 1 < groups ? lines * pitch : is_last ? 0 : back;
            add_piece<Numbers, ROWS, lines>(at + g * lines * pitch, pitch, row, width, ahead, d > 0,
                                            sums + g * lines * ROWS);
        }
        for (int64_t n = groups * lines; n < count; n++)
            add_piece<Numbers, ROWS, 1>(at + n * pitch, pitch, row, width, 0, d > 0, sums + n * ROWS);
    }
    for (int64_t s = 0; s < count * ROWS; s += LANES) {
        Floats some[LANES];
        for (int i = 0; i < LANES; i++) some[i] = sums[s + i];
        const Floats totals = sum_each(some);
        for (int64_t i = s; i < std::min<int64_t>(s + LANES, count * ROWS); i++) {
            const int64_t output = first + i / ROWS;
            float total = totals[i - s];
            if (call.bias.data) total += element_of(call.bias.data, call.bias.dtype, output * call.bias.stride_head);
            Numbers::put(call.result, i % ROWS * call.outputs + output, total);
        }
    }
}

template <class Numbers, int ROWS> void multiply(const SkinnyCall& call, const char* x, int64_t threads) {
    constexpr int64_t block = GROUPS * LINES<ROWS>;
    const int64_t steps = round_up(call.depth, Numbers::STEP) / Numbers::STEP;
    const int64_t pieces = round_up(steps * ROWS * sizeof(Words), PIECE_BYTES) / PIECE_BYTES;
    const int64_t piece = (steps + pieces - 1) / pieces * Numbers::STEP;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < call.outputs; first += block)
        multiply_block<Numbers, ROWS>(call, x, piece, first, std::min(block, call.outputs - first));
}

template <class Numbers> int64_t run_as(const SkinnyCall& call) {
    using Form = void (*)(const SkinnyCall&, const char*, int64_t);
    static constexpr Form forms[MOST_ROWS] = {multiply<Numbers, 1>, multiply<Numbers, 2>, multiply<Numbers, 3>,
                                              multiply<Numbers, 4>, multiply<Numbers, 5>, multiply<Numbers, 6>,
                                              multiply<Numbers, 7>, multiply<Numbers, 8>};
    const Scratch scratch(round_up(call.depth, Numbers::STEP) * Numbers::SIZE * call.rows);
    if (!scratch) return NO_MEMORY;
    interleave_rows<Numbers>(call, scratch.base());
    const bool small = double(call.outputs) * double(call.depth) < OUTPUTS_WORTH_A_THREAD;
    forms[call.rows - 1](call, scratch.base(), small ? 1 : std::max<int64_t>(call.threads, 1));
    return OK;
}

}  // namespace
}  // namespace k31

K31_EXPORT int64_t k31_skinny_linear_size() { return sizeof(k31::SkinnyCall); }

K31_EXPORT int64_t k31_skinny_linear(k31::SkinnyCall* call) {
    if (call->rows > k31::MOST_ROWS)
        return k31::PAIRS && call->x.dtype == k31::BFLOAT16 ? k31::multiply_many<k31::PairDot>(*call)
                                                            : k31::multiply_many<k31::FloatDot>(*call);
    return call->x.dtype == k31::FLOAT32 ? k31::run_as<k31::Singles>(*call) : k31::run_as<k31::Pairs>(*call);
}
