// Linear layers of more rows than the registers hold: outputs across the lanes, a range of them packed once into panels
// that stay in the second-level cache while all rows pass, and every row read where it lies.
//
// A sum runs through the depth in order, so a row's result depends on that row alone.
#pragma once
#include <algorithm>

#include "numbers.h"
#include "skinny_linear_call.h"

namespace k31 {

constexpr int64_t PANEL_BYTES = 256 << 10;   // of a range's panels: half of a small second-level cache
constexpr int64_t ROWS_PER_TASK = 512;       // packing a range must be little beside using it
constexpr double WORTH_A_THREAD_OF_TILES = 4e6;  // multiplications below which waking a thread costs more than it saves

template <class Dot> struct ManyRows {
    static constexpr int64_t WIDTH = WIDEST * LANES, ROWS = TILE_ROWS<WIDEST>;
    const SkinnyCall& call;
    const int64_t depth, threads, range, ranges, part;

    ManyRows(const SkinnyCall& call, int64_t threads)
        : call(call), depth(depth_of<Dot>(call.depth)), threads(threads), range(range_of(call, depth, threads)),
          ranges((call.outputs + range - 1) / range), part(threads > 1 ? ROWS_PER_TASK : call.rows) {}

    // As many outputs as panels have room for, and no more than let every thread have some.
    static int64_t range_of(const SkinnyCall& call, int64_t depth, int64_t threads) {
        const int64_t fit = PANEL_BYTES / (depth * 4) / WIDTH * WIDTH;
        return std::max(WIDTH, std::min(fit, round_up((call.outputs + threads - 1) / threads, WIDTH)));
    }

    int64_t bytes_of_panels() const { return round_up(range * depth * 4, 64); }
    int64_t bytes() const { return bytes_of_panels() + ROWS * depth * 4; }

    void run(char* scratch) const {
        const int64_t parts = (call.rows + part - 1) / part;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (int64_t task = 0; task < ranges * parts; task++) {
            char* own = scratch + omp_get_thread_num() * bytes();
            const int64_t first = task / parts * range, row = task % parts * part;
            multiply_range(first, std::min(range, call.outputs - first), row, std::min(row + part, call.rows),
                           reinterpret_cast<typename Dot::Element*>(own), own + bytes_of_panels());
        }
    }

    // Outputs [first, first + count) of the rows [row, end).
    void multiply_range(int64_t first, int64_t count, int64_t row, int64_t end, typename Dot::Element* panels,
                        char* copies) const {
        const Operand &w = call.weight, &x = call.x;
        const char* lines = w.data + first * w.stride_outer * size_of(w.dtype);
        for (int64_t c = 0; c < count; c += WIDTH)
            pack_panel<Dot>(lines, w.dtype, w.stride_outer, count, c, WIDEST, call.depth, panels + c * depth);
        const bool direct = in_place<Dot>(x.dtype, call.depth);
        for (; row < end; row += ROWS) {
            const char* rows[ROWS];
            for (int64_t r = 0; r < ROWS; r++) {
                rows[r] = x.data + std::min(row + r, end - 1) * x.stride_outer * size_of(x.dtype);
                if (direct) continue;
                char* copy = copies + r * depth * 4;
                copy_row(Dot{}, rows[r], x.dtype, call.depth, copy);
                rows[r] = copy;
            }
            for (int64_t c = 0; c < count; c += WIDTH) {
                Floats sums[ROWS][WIDEST] = {};
                dot_tile<Dot, int(ROWS), WIDEST>(rows, depth, panels + c * depth, sums);
                for (int64_t r = 0; r < std::min(ROWS, end - row); r++)
                    for (int v = 0; v < WIDEST; v++) put(row + r, first + c + v * LANES, sums[r][v]);
            }
        }
    }

    K31_INLINE void put(int64_t row, int64_t output, Floats sum) const {
        if (output >= call.outputs) return;
        if (call.bias.data)
            for (int64_t i = 0; i < std::min<int64_t>(LANES, call.outputs - output); i++)
                sum[i] += element_of(call.bias.data, call.bias.dtype, (output + i) * call.bias.stride_head);
        char* to = call.result + row * call.outputs * size_of(call.x.dtype);
        put_numbers(to, call.x.dtype, output, call.outputs, sum);
    }
};

template <class Dot> int64_t multiply_many(const SkinnyCall& call) {
    const double work = double(call.rows) * double(call.outputs) * double(call.depth);
    const ManyRows<Dot> many(call, work < WORTH_A_THREAD_OF_TILES ? 1 : std::max<int64_t>(call.threads, 1));
    const Scratch scratch(many.bytes() * many.threads);
    if (!scratch) return NO_MEMORY;
    many.run(scratch.base());
    return OK;
}

}  // namespace k31
