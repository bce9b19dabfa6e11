// k31::grouped_experts on the CPU (K3.1 spec 2.18).
//
// Round by round: as many blocks of tokens as the scratch has room for go through gate and up, the threads sharing
// blocks and ranges of inner numbers; then each thread takes a range of outputs and adds every block of the round to
// it, one after the other. So the sum over a token's experts runs in the order of the experts with any number of
// threads, and one token with one expert still occupies them all.
#include <omp.h>

#include "activation.h"
#include "expert_blocks.h"
#include "numbers.h"

namespace k31 {
namespace {

constexpr double WORTH_A_THREAD = 1e6;      // multiplications below which waking a thread costs more than it saves
constexpr int64_t HIDDEN_NUMBERS = 1 << 17;  // room for the inner activations of a round, per thread
constexpr int64_t SPAN = 48;                // what a task's range is a multiple of
constexpr int64_t TASKS = 4;                // tasks per thread that a phase should have at least

// Numbers [output][token] or [token][output], whichever the product gives.
struct Grid {
    float* data;
    int64_t per_output, per_token;

    Grid(float* data, bool by_lanes, int64_t lanes)
        : data(data), per_output(by_lanes ? lanes : 1), per_token(by_lanes ? 1 : CHUNK) {}
    K31_INLINE float at(int64_t output, int64_t token) const { return data[output * per_output + token * per_token]; }
};

// What one thread works with.
struct Worker {
    float* rows;     // [tokens][width]: the tokens of a block as floats
    float* panels;   // the same across the lanes, or pairs of them
    float* first;    // a chunk of a product
    float* second;
    ProductScratch product;
    int64_t prepared = -1;  // the block that rows and panels belong to

    static Worker carve(Carver& from, const ExpertsCall& call) {
        const int64_t tokens = tokens_per_block(call), numbers = tokens * call.width, chunk = CHUNK * tokens;
        return {from.take<float>(numbers), from.take<float>(numbers), from.take<float>(chunk), from.take<float>(chunk),
                ProductScratch::carve(from, std::max(call.width, call.inner))};
    }

    const float* gather(const ExpertsCall& call, const ExpertBlock& block, int64_t number);
};

// The tokens of a block, laid out as gate and up want them.
const float* Worker::gather(const ExpertsCall& call, const ExpertBlock& block, int64_t number) {
    const bool across = by_lanes(call.gate.transposed(), block.tokens);
    if (number == prepared) return across ? panels : rows;
    prepared = number;
    const bool pairs = across && reads_pairs(call);
    char* const lines = reinterpret_cast<char*>(rows);
    for (int64_t t = 0; t < block.tokens; t++) {
        const char* from = call.x.data + block.pairs[t].row * call.x.stride_outer * size_of(call.x.dtype);
        if (pairs) std::memcpy(lines + t * call.width * 2, from, size_t(call.width) * 2);
        else copy_row(FloatDot{}, from, call.x.dtype, call.width, lines + t * call.width * 4);
    }
    if (!across) return rows;
    if (pairs) {
        const int64_t depth = depth_of<PairDot>(call.width);
        for_panels(block.lanes() / LANES, [&](auto width, int64_t v) {
            pack_panel<PairDot>(lines, BFLOAT16, call.width, block.tokens, v * LANES, width.value, call.width,
                                reinterpret_cast<uint32_t*>(panels) + v * LANES * depth);
        });
        return panels;
    }
    for_panels(block.lanes() / LANES, [&](auto width, int64_t v) {
        pack_panel<FloatDot>(lines, FLOAT32, call.width, block.tokens, v * LANES,
                             width.value, call.width, panels + v * LANES * call.width);
    });
    return panels;
}

// gate[i] = act(gate[i], up[i]), rounded where the call says so; n is a multiple of LANES.
void activate(const ExpertsCall& call, float* gate, const float* up, int64_t n) {
    const float beta = float(call.beta), linear = float(call.linear_beta);
    const float per_beta = float(1 / call.beta), per_linear = linear != 0.0f ? float(1 / call.linear_beta) : 0.0f;
    const int64_t kept = rounds(call) ? BFLOAT16 : FLOAT32;
    for (int64_t i = 0; i < n; i += LANES) {
        const Floats g = load<Floats>(gate + i), open = sigmoid(g);
        Floats u = load<Floats>(up + i);
        if (call.situ && linear != 0.0f) u = tanh(u * per_linear) * linear;
        store(gate + i, rounded((call.situ ? tanh(g * per_beta) * beta : g) * open * u, kept));
    }
}

// Inner activations [first, first + count) of a block, all bfloat16, go to panels of pairs; `first` is even, a missing second number counts as zero.
void keep_pairs(const ExpertsCall& call, const ExpertBlock& block, const Grid& grid, int64_t first, int64_t count,
                uint32_t* hidden) {
    const int64_t depth = depth_of<PairDot>(call.inner);
    for_panels(block.lanes() / LANES, [&](auto width, int64_t v) {
        constexpr int64_t columns = width.value * LANES;
        const int64_t token = v * LANES, real = std::min(columns, block.tokens - token);
        for (int64_t i = 0; i < count; i += 2) {
            uint32_t* line = hidden + token * depth + (first + i) / 2 * columns;
            const bool paired = i + 1 < count;
            if (grid.per_token == 1) {
                const float *low = grid.data + i * grid.per_output + token, *high = low + grid.per_output;
                for (int64_t c = 0; c < columns; c += LANES)
                    store(line + c, bits<Words>(load<Floats>(low + c)) >> 16 |
                                        (paired ? bits<Words>(load<Floats>(high + c)) : Words{}));
            } else {
                for (int64_t c = 0; c < columns; c++)
                    line[c] = c < real ? PairDot::pack(grid.at(i, token + c), paired ? grid.at(i + 1, token + c) : 0.0f)
                                       : 0;
            }
        }
    });
}

// Inner activations [first, first + count) of a block go to where down reads them: panels or rows of all of them.
void keep(const ExpertsCall& call, const ExpertBlock& block, const Grid& grid, int64_t first, int64_t count,
          float* hidden) {
    if (!by_lanes(call.down.transposed(), block.tokens)) {
        for (int64_t t = 0; t < block.tokens; t++) {
            float* row = hidden + t * call.inner + first;
            if (grid.per_output == 1) std::copy_n(grid.data + t * grid.per_token, count, row);
            else for (int64_t i = 0; i < count; i++) row[i] = grid.at(i, t);
        }
        return;
    }
    if (keeps_pairs(call)) return keep_pairs(call, block, grid, first, count, reinterpret_cast<uint32_t*>(hidden));
    for_panels(block.lanes() / LANES, [&](auto width, int64_t v) {
        constexpr int64_t columns = width.value * LANES;
        const int64_t token = v * LANES, real = std::min(columns, block.tokens - token);
        for (int64_t i = 0; i < count; i++) {
            float* line = hidden + token * call.inner + (first + i) * columns;
            if (grid.per_token == 1) std::copy_n(grid.data + i * grid.per_output + token, columns, line);
            else for (int64_t c = 0; c < columns; c++) line[c] = c < real ? grid.at(i, token + c) : 0.0f;
        }
    });
}

// hidden = act(gate(x), up(x)) of a block, for the inner numbers [from, to).
void fill_hidden(const ExpertsCall& call, Worker& worker, const ExpertBlock& block, int64_t number, int64_t from, int64_t to,
                 float* hidden) {
    const float* x = worker.gather(call, block, number);
    const Matrix gate = call.gate.of(block.expert), up = call.up.of(block.expert);
    const bool across = by_lanes(gate.transposed, block.tokens), pairs = reads_pairs(call);
    for (int64_t i = from; i < to; i += CHUNK) {
        const int64_t count = std::min(CHUNK, to - i);
        multiply({gate, i, count, call.width}, x, block.tokens, worker.first, worker.product, pairs);
        multiply({up, i, count, call.width}, x, block.tokens, worker.second, worker.product, pairs);
        if (across) activate(call, worker.first, worker.second, count * block.lanes());
        for (int64_t t = 0; t < block.tokens && !across; t++)
            activate(call, worker.first + t * CHUNK, worker.second + t * CHUNK, round_up(count, LANES));
        keep(call, block, Grid(worker.first, across, block.lanes()), i, count, hidden);
    }
}

// result[row][l] += weight * down(hidden)[l] for the tokens of a block and l in [from, to).
void add_outputs(const ExpertsCall& call, Worker& worker, const ExpertBlock& block, const float* hidden, int64_t from,
                 int64_t to) {
    const Matrix down = call.down.of(block.expert);
    const Grid grid(worker.first, by_lanes(down.transposed, block.tokens), block.lanes());
    for (int64_t l = from; l < to; l += CHUNK) {
        const int64_t count = std::min(CHUNK, to - l);
        multiply({down, l, count, call.inner}, hidden, block.tokens, worker.first, worker.product, keeps_pairs(call));
        for (int64_t t = 0; t < block.tokens; t++) {
            const Pair& pair = block.pairs[t];
            float* row = call.result + pair.row * call.result_width + l;
            for (int64_t i = 0; i < count; i++) row[i] += pair.weight * grid.at(i, t);
        }
    }
}

// How long the range of a task is when `items` times `length` numbers are to be shared.
int64_t span_of(int64_t length, int64_t items, int64_t threads) {
    const int64_t parts = threads == 1 ? 1 : (TASKS * threads + items - 1) / items;
    return round_up((length + parts - 1) / parts, SPAN);
}

// The end of the longest run of blocks from `first` on whose inner activations fit the scratch; one always does.
int64_t end_of_round(const Routing& routing, int64_t first, int64_t room) {
    int64_t end = first + 1;
    while (end < routing.count && routing.hidden(first, end + 1) <= room) end++;
    return end;
}

// Both phases of every round, by all threads together.
void work(const ExpertsCall& call, const Routing& routing, Worker worker, float* hidden, int64_t room, int64_t threads) {
    for (int64_t first = 0, end; first < routing.count; first = end) {
        end = end_of_round(routing, first, room);
        const int64_t span = span_of(call.inner, end - first, threads), parts = (call.inner + span - 1) / span;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < (end - first) * parts; task++) {
            const int64_t number = first + task / parts, from = task % parts * span;
            fill_hidden(call, worker, routing.blocks[number], number, from, std::min(from + span, call.inner),
                        hidden + routing.hidden(first, number));
        }
        const int64_t range = span_of(call.result_width, 1, threads);
#pragma omp for schedule(dynamic, 1)
        for (int64_t from = 0; from < call.result_width; from += range)
            for (int64_t number = first; number < end; number++)
                add_outputs(call, worker, routing.blocks[number], hidden + routing.hidden(first, number), from,
                            std::min(from + range, call.result_width));
    }
}

int64_t run(const ExpertsCall& call) {
    const double products = double(call.rows) * double(call.slots) * double(call.inner);
    const bool worth = products * double(2 * call.width + call.result_width) >= WORTH_A_THREAD;
    const int64_t threads = worth ? std::max<int64_t>(call.threads, 1) : 1;
    Carver measure(nullptr);
    Routing::carve(measure, call);
    const int64_t room = std::max(HIDDEN_NUMBERS * threads, tokens_per_block(call) * call.inner);
    measure.take<float>(room);
    const int64_t shared = measure.used();
    Worker::carve(measure, call);
    const int64_t own = measure.used() - shared;
    const Scratch scratch(shared + own * threads);
    if (!scratch) return NO_MEMORY;
    Carver carver(scratch.base());
    Routing routing = Routing::carve(carver, call);
    float* hidden = carver.take<float>(room);
    routing.sort(call);
#pragma omp parallel num_threads(threads)
    {
        Carver mine(scratch.base() + shared + omp_get_thread_num() * own);
        work(call, routing, Worker::carve(mine, call), hidden, room, threads);
    }
    return OK;
}

}  // namespace
}  // namespace k31

K31_EXPORT int64_t k31_grouped_experts_size() { return sizeof(k31::ExpertsCall); }

K31_EXPORT int64_t k31_grouped_experts(k31::ExpertsCall* call) { return k31::run(*call); }
