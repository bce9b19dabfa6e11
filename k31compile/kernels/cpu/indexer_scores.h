// Scores of keys for rows of queries, as ranks.
//
// Query heads lie across the vector lanes (packed once per row), keys are broadcast from where they lie; the weighted
// sum over heads never leaves the registers' neighbourhood, so a score costs its multiplications and little else.
// Where half of the lanes would have no head, they take every other element of depth instead. Where one vector has room
// for all heads, rows of a request lie side by side, so that a key is broadcast for several of them at once.
#pragma once
#include <algorithm>

#include "indexer_call.h"
#include "select.h"
#include "tile.h"

namespace k31 {

// What a row sees: of the positions from `begin` to `end` those that the mask does not hide, `count` of them.
struct Seen {
    MaskRow mask{};
    int64_t begin = 0, end = 0, count = 0;

    Seen() = default;
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
constexpr int64_t RANK_BYTES = 1 << 20;  // what the ranks of rows that are scored together may take

// How many rows of a request are scored together.
inline int64_t rows_together(const IndexerCall& call) {
    int64_t rows = call.heads <= LANES ? WIDEST : 1;
    while (rows > 1 && (rows > call.lengths.rows || rows * call.lengths.limit * 4 > RANK_BYTES)) rows /= 2;
    return rows;
}

// Queries: panels of heads, and beside each head vector its weights and the mask of heads that exist. One row has as
// many panels as its heads fill, of several rows each is a vector of one panel.
template <class Dot> struct PackedQueries {
    using Element = typename Dot::Element;
    static constexpr bool TWO = sizeof(typename Dot::Step) == 8;  // lanes for each head
    Element* panels;
    Floats* weights;
    Words* exists;

    static PackedQueries carve(Carver& from, const IndexerCall& call) {
        const int64_t columns = round_up(call.heads, LANES) * rows_together(call);
        return {from.take<Element>(columns * depth_of<Dot>(call.width)), from.take<Floats>(columns / LANES),
                from.take<Words>(columns / LANES)};
    }

    void pack(const IndexerCall& call, int64_t b, int64_t first, int rows) {
        const int64_t vectors = round_up(call.heads, LANES) / LANES, depth = depth_of<Dot>(call.width);
        for (int r = 0; r < rows; r++) {
            for (int64_t v = 0; v < vectors; v += panel_width(vectors - v))
                pack_heads(call, query_of(call, b, first + r), v, rows > 1 ? 1 : panel_width(vectors - v),
                           rows > 1 ? panels + r * LANES : panels + v * LANES * depth, rows);
            weigh(call, b, first + r, weights + r, exists + r);
        }
    }

  private:
    static const char* query_of(const IndexerCall& call, int64_t b, int64_t row) {
        const Operand& q = call.query;
        return q.data + (b * q.stride_outer + row * q.stride_row) * size_of(q.dtype);
    }

    // Head vectors [first, first + vecs) of a query, to a panel in which `rows` rows lie side by side.
    static void pack_heads(const IndexerCall& call, const char* query, int64_t first, int vecs, Element* panel, int rows) {
        const Operand& q = call.query;
        if constexpr (TWO)
            pack_panel(Dot{}, query, q.dtype, q.stride_head, call.heads, call.width, panel, rows * LANES);
        else
            pack_panel<Dot>(query, q.dtype, q.stride_head, call.heads, first * LANES, vecs, call.width, panel,
                            rows * vecs * LANES);
    }

    static void weigh(const IndexerCall& call, int64_t b, int64_t row, Floats* weights, Words* exists) {
        const Operand& w = call.weights;
        const char* weight = w.data + (b * w.stride_outer + row * w.stride_row) * size_of(w.dtype);
        for (int64_t lane = 0; lane < round_up(call.heads, LANES); lane++) {
            const int64_t h = TWO ? lane / 2 : lane;
            const bool real = h < call.heads && !(TWO && lane % 2);
            store(reinterpret_cast<char*>(weights) + lane * 4,
                  real ? element_of(weight, w.dtype, h * w.stride_head) : 0.0f);
            store(reinterpret_cast<char*>(exists) + lane * 4, real ? 0xffffffffu : 0u);
        }
    }
};

constexpr int64_t ROW_SUMS = (ROW_BLOCK + LANES - 1) / LANES * LANES;

// What one thread needs to score a block of keys.
struct KeyBlock {
    const char* keys[ROW_BLOCK];   // where they lie
    const char* ahead[ROW_BLOCK];  // those of the next block; of no use in the last one
    const char* rows[ROW_BLOCK];   // what is multiplied: the keys, or copies of them
    char* copies;
    Floats* sums;  // ROW_SUMS of each row

    static KeyBlock carve(Carver& from, int64_t depth) {
        KeyBlock block{};
        block.copies = from.take<char>(ROW_BLOCK * depth * 4);
        block.sums = from.take<Floats>(ROW_SUMS * WIDEST);
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

// sums[r] += weights * relu(keys[r] . panel), lane by lane, for ROWS keys and one panel of VECS head vectors; if they are
// APART, of a row each, with sums of its own.
template <class Dot, int ROWS, int VECS, bool APART>
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
        Floats sum = first ? Floats{} : sums[m];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
            if constexpr (PackedQueries<Dot>::TWO)
                dots[m][v] += __builtin_shuffle(dots[m][v], load<Ints>(NEIGHBOURS.at));
            // A lane without a head must stay zero even where the key is infinite (0 * inf).
            const Floats dot = bits<Floats>(bits<Words>(dots[m][v]) & exists[v]);
            if constexpr (APART) sums[v * ROW_SUMS + m] = Floats{} + weights[v] * relu(dot);
            else sum += weights[v] * relu(dot);
        }
        if constexpr (!APART) sums[m] = sum;
    }
}

template <class Dot, int VECS, bool APART = false>
void score_panel(KeyBlock& block, int64_t keys, int64_t ahead_bytes, int64_t steps, const typename Dot::Element* panel,
                 const Floats* weights, const Words* exists, bool first) {
    constexpr int ROWS = TILE_ROWS<VECS>;
    for (int64_t r = 0; r < keys; r += ROWS)
        score_tile<Dot, ROWS, VECS, APART>(block.rows + r, block.ahead + r, ahead_bytes, steps, panel, weights, exists, first,
                                    block.sums + r);
}

// The ranks of the positions from `from` on, whose scores lie across the lanes of a row's sums.
inline void rank_block(const Floats* block_sums, int64_t keys, const MaskRow& mask, int64_t from, uint32_t* ranks) {
    for (int64_t r = 0; r < keys; r += LANES) {
        Floats sums[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) sums[i] = block_sums[r + i];
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

// Rows of a request that are scored together, and what each of them sees. Ranks beyond it are computed and not read.
struct Rows {
    int64_t b, first;
    int count;
    Seen seen[WIDEST];

    Rows(const IndexerCall& call, int64_t b, int64_t first, int count) : b(b), first(first), count(count) {
        for (int r = 0; r < count; r++) seen[r] = Seen(call, b, first + r);
    }
};

// Scores of the block's first `keys` keys; `has_next` says whether the keys ahead are any.
template <class Dot>
void score_block(const IndexerCall& call, const Rows& rows, const PackedQueries<Dot>& queries, KeyBlock& block,
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
        const int width = rows.count > 1 ? rows.count : panel_width(vectors - v);
        auto score = score_panel<Dot, 1>;
        if (rows.count > 1) score = width == 2 ? score_panel<Dot, 2, true> : score_panel<Dot, WIDEST, true>;
        else if constexpr (!PackedQueries<Dot>::TWO)
            if (width > 1) score = width == 2 ? score_panel<Dot, 2> : score_panel<Dot, WIDEST>;
        score(block, keys, has_next && v == 0 ? bytes : 0, steps_of<Dot>(call.width), queries.panels + v * LANES * depth,
              queries.weights + v, queries.exists + v, v == 0);
        v += width;
    }
    for (int r = 0; r < rows.count; r++)
        rank_block(block.sums + r * ROW_SUMS, keys, rows.seen[r].mask, from, ranks + r * call.lengths.limit);
}

template <class Dot>
void score_range(const IndexerCall& call, const Rows& rows, const PackedQueries<Dot>& queries, KeyBlock& block,
                 int64_t from, int64_t to, uint32_t* ranks) {
    const RequestCache cache{call.paging, rows.b};
    RowWalk walk(cache, call.key, from, 0);
    const auto keys_at = [to](int64_t s) { return std::clamp<int64_t>(to - s, 0, ROW_BLOCK); };
    for (int64_t r = 0; r < keys_at(from); r++) block.ahead[r] = walk.next();
    for (int64_t s = from; s < to; s += ROW_BLOCK) {
        std::copy(block.ahead, block.ahead + ROW_BLOCK, block.keys);
        const int64_t next = keys_at(s + ROW_BLOCK);
        for (int64_t r = 0; r < ROW_BLOCK && next; r++) block.ahead[r] = r < next ? walk.next() : block.ahead[r - 1];
        score_block<Dot>(call, rows, queries, block, s, keys_at(s), next > 0, ranks);
    }
}

}  // namespace k31
