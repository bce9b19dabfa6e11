// Exact top-k of a row of scores: larger first, equal ones by lower position, NaN largest (as torch.topk).
#pragma once
#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace k31 {

// Order-preserving image of a float: as unsigned numbers, larger means larger, and every NaN is the top. A score is a
// sum that starts from +0, so it is never -0.
K31_INLINE uint32_t rank_of(float x) {
    if (x != x) return 0xffffffffu;
    const uint32_t word = bits<uint32_t>(x);
    return word & 0x80000000u ? ~word : word | 0x80000000u;
}

// The same of LANES floats, a -0 among them equal to +0.
K31_INLINE Words ranks_of(Floats x) {
    const Words word = bits<Words>(x + 0.0f), sign = bits<Words>(bits<Ints>(word) >> 31);
    return (word ^ (sign | 0x80000000u)) | bits<Words>(x != x);
}

struct Threshold {
    uint32_t rank;  // the lowest rank that is selected
    int64_t ties;   // how many of the positions with exactly that rank are
};

// How many of n ranks are at least `least`.
inline int64_t count_from(const uint32_t* ranks, int64_t n, uint32_t least) {
    const Words bound = least - Words{};
    Words counts[4] = {};  // separate ones, or each addition would wait for the last
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) counts[c] -= bits<Words>(load<Words>(ranks + i + c * LANES) >= bound);
    const Words all = counts[0] + counts[1] + counts[2] + counts[3];
    int64_t count = 0;
    for (int lane = 0; lane < LANES; lane++) count += all[lane];
    for (; i < n; i++) count += ranks[i] >= least;
    return count;
}

// The k-th largest rank of n > k > 0, by halving what it may be: counting is a few instructions a vector, and mostly some
// rank that exactly k reach is met long before the last bit.
inline Threshold find_threshold(const uint32_t* ranks, int64_t n, int64_t k) {
    uint32_t low = UINT32_MAX, high = 0;  // at least k ranks reach `low`, fewer than k, `above` of them, are over `high`
    for (int64_t i = 0; i < n; i++) {
        low = std::min(low, ranks[i]);
        high = std::max(high, ranks[i]);
    }
    int64_t above = 0;
    while (low < high) {
        const uint32_t middle = high - (high - low) / 2;
        const int64_t count = count_from(ranks, n, middle);
        if (count == k) return {middle, INT64_MAX};  // those with this rank are taken whole
        if (count > k) low = middle;
        else high = middle - 1, above = count;
    }
    return {low, k - above};
}

// Positions of the k best of n into out[0..min(n, k)), ascending.
inline void select_positions(const uint32_t* ranks, int64_t n, int64_t k, int32_t* out) {
    if (n <= k) {
        for (int64_t i = 0; i < n; i++) out[i] = int32_t(i);
        return;
    }
    if (k <= 0) return;
    Threshold least = find_threshold(ranks, n, k);
    int64_t filled = 0;
    // Without a branch: which positions are selected, nothing can predict.
    for (int64_t i = 0; filled < k; i++) {
        const bool is_tie = ranks[i] == least.rank, is_taken = ranks[i] > least.rank || (is_tie & (least.ties > 0));
        least.ties -= is_tie;
        out[filled] = int32_t(i);
        filled += is_taken;
    }
}

// Reorder selected positions by rank, larger first, lower position first among equals.
inline void sort_by_score(const uint32_t* ranks, int64_t count, int32_t* positions) {
    std::sort(positions, positions + count, [ranks](int32_t a, int32_t b) {
        return ranks[a] != ranks[b] ? ranks[a] > ranks[b] : a < b;
    });
}

// Places of the k best of n in order, by insertion: for a k so small that few places ever enter.
inline void insert_best(const uint32_t* ranks, int64_t n, int64_t k, int32_t* best) {
    for (int64_t i = 0, count = 0; i < n && k > 0; i++) {
        if (count == k && ranks[i] <= ranks[best[k - 1]]) continue;
        int64_t j = count < k ? count++ : k - 1;
        for (; j > 0 && ranks[best[j - 1]] < ranks[i]; j--) best[j] = best[j - 1];
        best[j] = int32_t(i);
    }
}

}  // namespace k31
