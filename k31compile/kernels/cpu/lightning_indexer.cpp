// k31::lightning_indexer on the CPU (K3.1 spec 2.8): score every visible key, keep the best positions.
//
// Query heads lie across the vector lanes (packed once per row), keys are broadcast from where they lie; the weighted
// sum over heads never leaves the registers' neighbourhood, so a score costs its multiplications and little else.
// Where half of the lanes would have no head, they take every other element of depth instead.
#include <omp.h>

#include "indexer_call.h"
#include "select.h"
#include "tile.h"

namespace k31 {

// What a row sees: of the positions from `begin` to `end` those that the mask does not hide, `count` of them.
struct Seen {
    MaskRow mask;
    int64_t begin, end, count;

    Seen(const IndexerCall& call, int64_t b, int64_t row)
        : mask(call.mask.row(b, row)), begin(0), end(call.lengths.visible(b, row)), count(end) {
        if (!mask.data) return;
        while (end > 0 && mask.hides(end - 1)) end--;
        while (begin < end && mask.hides(begin)) begin++;
        count = 0;
        for (int64_t s = begin; s < end; s++) count += !mask.hides(s);
    }
    bool has(int64_t s) const { return s >= begin && s < end && !mask.hides(s); }
};

constexpr uint32_t HIDDEN_RANK = 0;  // below every rank of a score
constexpr int64_t KEYS_PER_TASK = 16 * ROW_BLOCK;
constexpr double WORTH_A_THREAD = 2e6;  // multiplications below which waking a thread costs more than it saves

// One row's query: panels of heads, and beside each head vector its weights and the mask of heads that exist.
template <class Dot> struct PackedQuery {
    using Element = typename Dot::Element;
    static constexpr bool TWO = sizeof(typename Dot::Step) == 8;  // lanes for each head
    Element* panels;
    Floats* weights;
    Words* exists;

    static PackedQuery carve(Carver& from, const IndexerCall& call) {
        const int64_t columns = round_up(call.heads, LANES);
        return {from.take<Element>(columns * depth_of<Dot>(call.width)), from.take<Floats>(columns / LANES),
                from.take<Words>(columns / LANES)};
    }

    void pack(const IndexerCall& call, int64_t b, int64_t row) {
        const Operand &q = call.query, &w = call.weights;
        const char* query = q.data + (b * q.stride_outer + row * q.stride_row) * size_of(q.dtype);
        const char* weight = w.data + (b * w.stride_outer + row * w.stride_row) * size_of(w.dtype);
        const int64_t vectors = round_up(call.heads, LANES) / LANES, depth = depth_of<Dot>(call.width);
        if constexpr (TWO) pack_panel(Dot{}, query, q.dtype, q.stride_head, call.heads, call.width, panels);
        else
            for (int64_t v = 0; v < vectors; v += panel_width(vectors - v))
                pack_panel<Dot>(query, q.dtype, q.stride_head, call.heads, v * LANES, panel_width(vectors - v),
                                call.width, panels + v * LANES * depth);
        for (int64_t lane = 0; lane < vectors * LANES; lane++) {
            const int64_t h = TWO ? lane / 2 : lane;
            const bool real = h < call.heads && !(TWO && lane % 2);
            store(reinterpret_cast<char*>(weights) + lane * 4,
                  real ? element_of(weight, w.dtype, h * w.stride_head) : 0.0f);
            store(reinterpret_cast<char*>(exists) + lane * 4, real ? 0xffffffffu : 0u);
        }
    }
};

// What one thread needs to score a block of keys.
struct KeyBlock {
    const char* keys[ROW_BLOCK];   // where they lie
    const char* ahead[ROW_BLOCK];  // those of the next block; of no use in the last one
    const char* rows[ROW_BLOCK];   // what is multiplied: the keys, or copies of them
    char* copies;
    Floats* sums;

    static KeyBlock carve(Carver& from, int64_t depth) {
        KeyBlock block{};
        block.copies = from.take<char>(ROW_BLOCK * depth * 4);
        block.sums = from.take<Floats>(round_up(ROW_BLOCK, LANES));
        return block;
    }
};

struct Neighbours {
    int32_t at[LANES] = {};
    constexpr Neighbours() {
        for (int i = 0; i < LANES; i++) at[i] = i ^ 1;
    }
};
inline constexpr Neighbours NEIGHBOURS;

// dots[r] = rows[r] . panel, while the keys `ahead` are fetched. Few heads are done so soon that memory must not wait
// either: their lines are asked for one by one between the products, since all at once would fill the places in which
// misses wait. With more heads that costs registers, and the products hide it anyway.
template <class Dot, int ROWS, int VECS>
K31_INLINE void multiply_and_fetch(const char* const (&row)[ROWS], const char* const* ahead, int64_t ahead_bytes,
                                   int64_t steps, const typename Dot::Element* panel, Floats (&dots)[ROWS][VECS]) {
    constexpr int64_t SIZE = sizeof(typename Dot::Step), LINE = 64;
    if constexpr (VECS > 1) {
        for (int m = 0; m < ROWS; m++) prefetch_far(ahead[m], ahead_bytes);
        multiply<Dot, false>(row, 0, steps, panel, dots, SIZE);
    } else {
        for (int64_t k = 0; k < steps; k += LINE / SIZE) {
            if (k * SIZE < ahead_bytes)
#pragma GCC unroll 16
                for (int m = 0; m < ROWS; m++) __builtin_prefetch(ahead[m] + k * SIZE, 0, 1);
            multiply<Dot, false>(row, k, std::min(k + LINE / SIZE, steps), panel, dots, SIZE);
        }
    }
}

// sums[r] += weights * relu(keys[r] . panel), lane by lane, for ROWS keys and one panel of VECS head vectors.
template <class Dot, int ROWS, int VECS>
__attribute__((noinline)) void score_tile(const char* const* rows, const char* const* ahead, int64_t ahead_bytes,
                                          int64_t steps, const typename Dot::Element* panel, const Floats* weights,
                                          const Words* exists, bool first, Floats* sums) {
    const char* row[ROWS];
    Floats dots[ROWS][VECS];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        row[m] = rows[m];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) dots[m][v] = Floats{};
    }
    multiply_and_fetch<Dot>(row, ahead, ahead_bytes, steps, panel, dots);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        if constexpr (PackedQuery<Dot>::TWO) dots[m][0] += __builtin_shuffle(dots[m][0], load<Ints>(NEIGHBOURS.at));
        Floats sum = first ? Floats{} : sums[m];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
            // A lane without a head must stay zero even where the key is infinite (0 * inf).
            const Floats dot = bits<Floats>(bits<Words>(dots[m][v]) & exists[v]);
            sum += weights[v] * relu(dot);
        }
        sums[m] = sum;
    }
}

template <class Dot, int VECS>
void score_panel(KeyBlock& block, int64_t keys, int64_t ahead_bytes, int64_t steps, const typename Dot::Element* panel,
                 const Floats* weights, const Words* exists, bool first) {
    constexpr int ROWS = TILE_ROWS<VECS>;
    for (int64_t r = 0; r < keys; r += ROWS)
        score_tile<Dot, ROWS, VECS>(block.rows + r, block.ahead + r, ahead_bytes, steps, panel, weights, exists, first,
                                    block.sums + r);
}

// The ranks of the positions from `from` on, whose scores lie across the lanes of the block's sums.
inline void rank_block(const KeyBlock& block, int64_t keys, const MaskRow& mask, int64_t from, uint32_t* ranks) {
    for (int64_t r = 0; r < keys; r += LANES) {
        Floats sums[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) sums[i] = block.sums[r + i];
        const int64_t left = keys - r;
        Floats scores = sum_each(sums);
        if (mask.is_float())
            for (int64_t i = 0; i < left && i < LANES; i++) scores[i] += mask.bias(from + r + i);
        const Words here = ranks_of(scores);
        if (left >= LANES) store(ranks + from + r, here);
        else std::memcpy(ranks + from + r, &here, size_t(left) * 4);
        if (!mask.data) continue;
        for (int64_t i = r; i < keys && i < r + LANES; i++)
            if (mask.hides(from + i)) ranks[from + i] = HIDDEN_RANK;
    }
}

// Scores of the block's first `keys` keys; `has_next` says whether the keys ahead are any.
template <class Dot>
void score_block(const IndexerCall& call, const PackedQuery<Dot>& query, KeyBlock& block, const MaskRow& mask,
                 int64_t from, int64_t keys, bool has_next, uint32_t* ranks) {
    const int64_t depth = depth_of<Dot>(call.width), bytes = call.width * size_of(call.key.dtype);
    const bool direct = in_place<Dot>(call.key.dtype, call.width);
    for (int64_t r = 0; r < ROW_BLOCK; r++) {
        if (r >= keys) {
            block.rows[r] = block.rows[keys - 1];  // whole tiles: what these rows give is dropped
            continue;
        }
        block.rows[r] = direct ? block.keys[r] : block.copies + r * depth * 4;
        if (!direct) copy_row(Dot{}, block.keys[r], call.key.dtype, call.width, block.copies + r * depth * 4);
    }
    const int64_t vectors = round_up(call.heads, LANES) / LANES;
    for (int64_t v = 0; v < vectors;) {
        const int width = panel_width(vectors - v);
        const auto* panel = query.panels + v * LANES * depth;
        auto score = score_panel<Dot, 1>;
        if constexpr (!PackedQuery<Dot>::TWO)
            if (width > 1) score = width == 2 ? score_panel<Dot, 2> : score_panel<Dot, WIDEST>;
        score(block, keys, has_next && v == 0 ? bytes : 0, steps_of<Dot>(call.width), panel, query.weights + v,
              query.exists + v, v == 0);
        v += width;
    }
    rank_block(block, keys, mask, from, ranks);
}

template <class Dot>
void score_range(const IndexerCall& call, const PackedQuery<Dot>& query, KeyBlock& block, const RequestCache& cache,
                 const MaskRow& mask, int64_t from, int64_t to, uint32_t* ranks) {
    RowWalk walk(cache, call.key, from, 0);
    const auto keys_at = [to](int64_t s) { return std::clamp<int64_t>(to - s, 0, ROW_BLOCK); };
    for (int64_t r = 0; r < keys_at(from); r++) block.ahead[r] = walk.next();
    for (int64_t s = from; s < to; s += ROW_BLOCK) {
        std::copy(block.ahead, block.ahead + ROW_BLOCK, block.keys);
        const int64_t next = keys_at(s + ROW_BLOCK);
        for (int64_t r = 0; r < ROW_BLOCK && next; r++) block.ahead[r] = r < next ? walk.next() : block.ahead[r - 1];
        score_block<Dot>(call, query, block, mask, s, keys_at(s), next > 0, ranks);
    }
}

// A row that sees no more than `count` keys selects them all: nothing to score unless their order is asked for.
inline bool needs_scores(const IndexerCall& call, const Seen& seen) {
    return seen.count > call.count ? call.count > 0 : call.by_score && seen.count > 1;
}

void emit(const IndexerCall& call, const Seen& seen, uint32_t* ranks, uint32_t* counts, int32_t* out) {
    const int64_t selected = std::min(seen.count, call.count);
    if (seen.count > call.count) {
        std::fill(ranks, ranks + seen.begin, HIDDEN_RANK);
        select_positions(ranks, seen.end, call.count, counts, out);
    } else {
        for (int64_t s = seen.begin, j = 0; s < seen.end; s++)
            if (seen.has(s)) out[j++] = int32_t(s);
    }
    if (call.by_score && needs_scores(call, seen)) sort_by_score(ranks, selected, out);
    for (int64_t j = selected, s = 0; j < call.count; j++, s++) {
        if (call.fill_lowest)
            while (seen.has(s)) s++;
        out[j] = call.fill_lowest ? int32_t(s) : -1;
    }
}

// Everything that a thread touches when it works on a row.
template <class Dot> struct Worker {
    PackedQuery<Dot> query;
    KeyBlock block;
    uint32_t* ranks;
    uint32_t* counts;

    static Worker carve(Carver& from, const IndexerCall& call) {
        return {PackedQuery<Dot>::carve(from, call), KeyBlock::carve(from, depth_of<Dot>(call.width)),
                from.take<uint32_t>(call.lengths.limit), from.take<uint32_t>(SELECT_WORDS)};
    }
};

// Many rows: each thread takes whole rows, the longest histories first.
template <class Dot> void over_rows(const IndexerCall& call, int64_t threads, char* base, int64_t stride) {
    const int64_t rows = call.lengths.rows, batch = call.lengths.batch;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t item = batch * rows - 1; item >= 0; item--) {
        const int64_t row = item / batch, b = item % batch;
        Carver carver(base + omp_get_thread_num() * stride);
        Worker<Dot> worker = Worker<Dot>::carve(carver, call);
        const Seen seen(call, b, row);
        if (needs_scores(call, seen)) {
            worker.query.pack(call, b, row);
            score_range<Dot>(call, worker.query, worker.block, {call.paging, b}, seen.mask, seen.begin, seen.end,
                             worker.ranks);
        }
        emit(call, seen, worker.ranks, worker.counts, call.result + (b * rows + row) * call.count);
    }
}

// Few rows (decode): the threads share the keys of one row after the other.
template <class Dot> void over_keys(const IndexerCall& call, int64_t threads, char* base, int64_t stride) {
    Carver shared_carver(base);
    Worker<Dot> shared = Worker<Dot>::carve(shared_carver, call);
    for (int64_t item = 0; item < call.lengths.batch * call.lengths.rows; item++) {
        const int64_t b = item / call.lengths.rows, row = item % call.lengths.rows;
        const Seen seen(call, b, row);
        if (needs_scores(call, seen)) {
            shared.query.pack(call, b, row);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
            for (int64_t s = seen.begin; s < seen.end; s += KEYS_PER_TASK) {
                Carver carver(base + omp_get_thread_num() * stride);
                KeyBlock block = Worker<Dot>::carve(carver, call).block;
                score_range<Dot>(call, shared.query, block, {call.paging, b}, seen.mask, s,
                                 std::min(s + KEYS_PER_TASK, seen.end), shared.ranks);
            }
        }
        emit(call, seen, shared.ranks, shared.counts, call.result + item * call.count);
    }
}

// Every block that a visible position lies in must exist, before the first of them is read.
int64_t check_blocks(IndexerCall& call) {
    if (!call.paging.table) return OK;
    for (int64_t b = 0; b < call.lengths.batch; b++) {
        int64_t visible = 0;
        for (int64_t row = 0; row < call.lengths.rows; row++) visible = std::max(visible, call.lengths.visible(b, row));
        for (int64_t s = 0; s < visible; s += call.paging.page)
            if (!RequestCache{call.paging, b}.exists(s)) {
                call.failed = b;
                return BAD_BLOCK;
            }
    }
    return OK;
}

template <class Dot> int64_t run_by(const IndexerCall& call) {
    const int64_t items = call.lengths.batch * call.lengths.rows;
    const double work = double(items) * double(call.lengths.limit) * double(call.heads) * double(call.width);
    const int64_t threads = work < WORTH_A_THREAD ? 1 : std::max<int64_t>(call.threads, 1);
    const bool few = threads > 1 && items < 4 * threads;
    Carver measure(nullptr);
    Worker<Dot>::carve(measure, call);
    const Scratch scratch(measure.used() * threads);
    if (!scratch) return NO_MEMORY;
    (few ? over_keys<Dot> : over_rows<Dot>)(call, threads, scratch.base(), measure.used());
    return OK;
}

template <class Dot> int64_t run(const IndexerCall& call) {
    const bool two = call.heads * 2 <= LANES && call.width % (2 * Dot::PER_ELEMENT) == 0;
    return two ? run_by<TwoSteps<Dot>>(call) : run_by<Dot>(call);
}

}  // namespace k31

K31_EXPORT int64_t k31_lightning_indexer_size() { return sizeof(k31::IndexerCall); }

K31_EXPORT int64_t k31_lightning_indexer(k31::IndexerCall* call) {
    if (const int64_t status = k31::check_blocks(*call)) return status;
    const bool pairs = k31::PAIRS && call->query.dtype == k31::BFLOAT16 && call->key.dtype == k31::BFLOAT16;
    return pairs ? k31::run<k31::PairDot>(*call) : k31::run<k31::FloatDot>(*call);
}
