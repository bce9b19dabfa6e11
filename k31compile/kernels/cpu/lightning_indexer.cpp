// k31::lightning_indexer on the CPU (K3.1 spec 2.8): score every visible key, keep the best positions.
#include <omp.h>

#include "indexer_scores.h"

namespace k31 {

constexpr int64_t KEYS_PER_TASK = 16 * ROW_BLOCK;
constexpr double WORTH_A_THREAD = 2e6;  // multiplications below which waking a thread costs more than it saves

// A row that sees no more than `count` keys selects them all: nothing to score unless their order is asked for.
inline bool needs_scores(const IndexerCall& call, const Seen& seen) {
    return seen.count > call.count ? call.count > 0 : call.by_score && seen.count > 1;
}

void emit(const IndexerCall& call, const Seen& seen, uint32_t* ranks, int32_t* out) {
    const int64_t selected = std::min(seen.count, call.count);
    if (seen.count > call.count) {
        std::fill(ranks, ranks + seen.begin, HIDDEN_RANK);
        select_positions(ranks, seen.end, call.count, out);
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

// The positions [from, to) that rows must score, none where all of them select all that they see.
struct Scored {
    int64_t from = INT64_MAX, to = 0;

    Scored(const IndexerCall& call, const Rows& rows) {
        for (int r = 0; r < rows.count; r++) {
            if (!needs_scores(call, rows.seen[r])) continue;
            from = std::min(from, rows.seen[r].begin);
            to = std::max(to, rows.seen[r].end);
        }
    }
};

// Everything that a thread touches when it works on rows.
template <class Dot> struct Worker {
    PackedQueries<Dot> queries;
    KeyBlock block;
    uint32_t* ranks;

    static Worker carve(Carver& from, const IndexerCall& call) {
        return {PackedQueries<Dot>::carve(from, call), KeyBlock::carve(from, depth_of<Dot>(call.width)),
                from.take<uint32_t>(call.lengths.limit * rows_together(call))};
    }

    void emit_all(const IndexerCall& call, const Rows& rows) {
        int32_t* out = call.result + (rows.b * call.lengths.rows + rows.first) * call.count;
        for (int r = 0; r < rows.count; r++)
            emit(call, rows.seen[r], ranks + r * call.lengths.limit, out + r * call.count);
    }
};

// Call f(rows) for those of a request that are scored together, the group'th of them.
template <class F> void for_rows(const IndexerCall& call, int64_t b, int64_t group, F f) {
    const int64_t most = rows_together(call), end = std::min((group + 1) * most, call.lengths.rows);
    for (int64_t row = group * most; row < end;) {
        const int count = most > 1 ? panel_width(end - row) : 1;
        f(Rows(call, b, row, count));
        row += count;
    }
}

inline int64_t groups_of(const IndexerCall& call) {
    const int64_t most = rows_together(call);
    return (call.lengths.rows + most - 1) / most;
}

// Many rows: each thread takes whole rows, the longest histories first.
template <class Dot> void over_rows(const IndexerCall& call, int64_t threads, char* base, int64_t stride) {
    const int64_t batch = call.lengths.batch;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t item = batch * groups_of(call) - 1; item >= 0; item--) {
        Carver carver(base + omp_get_thread_num() * stride);
        Worker<Dot> worker = Worker<Dot>::carve(carver, call);
        for_rows(call, item % batch, item / batch, [&](const Rows& rows) {
            if (const Scored scored(call, rows); scored.to > 0) {
                worker.queries.pack(call, rows.b, rows.first, rows.count);
                score_range<Dot>(call, rows, worker.queries, worker.block, scored.from, scored.to, worker.ranks);
            }
            worker.emit_all(call, rows);
        });
    }
}

// Few rows (decode): the threads share the keys of some rows after others.
template <class Dot> void over_keys(const IndexerCall& call, int64_t threads, char* base, int64_t stride) {
    Carver shared_carver(base);
    Worker<Dot> shared = Worker<Dot>::carve(shared_carver, call);
    const auto work = [&](const Rows& rows) {
        if (const Scored scored(call, rows); scored.to > 0) {
            shared.queries.pack(call, rows.b, rows.first, rows.count);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
            for (int64_t s = scored.from; s < scored.to; s += KEYS_PER_TASK) {
                Carver carver(base + omp_get_thread_num() * stride);
                KeyBlock block = Worker<Dot>::carve(carver, call).block;
                score_range<Dot>(call, rows, shared.queries, block, s, std::min(s + KEYS_PER_TASK, scored.to),
                                 shared.ranks);
            }
        }
        shared.emit_all(call, rows);
    };
    for (int64_t b = 0; b < call.lengths.batch; b++)
        for (int64_t group = 0; group < groups_of(call); group++) for_rows(call, b, group, work);
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
    const bool few = threads > 1 && call.lengths.batch * groups_of(call) < 4 * threads;
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
