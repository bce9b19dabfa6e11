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

constexpr int DIGIT_BITS = 8;
constexpr int DIGITS = 1 << DIGIT_BITS;
constexpr int COUNTERS = 4;  // neighbours often fall into one bucket: separate tables keep the additions apart

// Scratch of a selection, in words.
constexpr int64_t SELECT_WORDS = int64_t(DIGITS) * COUNTERS;

struct Threshold {
    uint32_t rank;  // the lowest rank that is selected
    int64_t ties;   // how many of the positions with exactly that rank are
};

// Counts of the digit at `shift`, among ranks that agree with `prefix` above it; summed into counts[0..DIGITS).
inline void count_digits(const uint32_t* ranks, int64_t n, uint32_t prefix, uint32_t mask, int shift, uint32_t* counts) {
    std::fill(counts, counts + SELECT_WORDS, 0u);
    for (int64_t i = 0; i < n; i++)
        if ((ranks[i] & mask) == prefix) counts[(i % COUNTERS) * DIGITS + (ranks[i] >> shift & (DIGITS - 1))]++;
    for (int c = 1; c < COUNTERS; c++)
        for (int d = 0; d < DIGITS; d++) counts[d] += counts[c * DIGITS + d];
}

// The k-th largest rank of n > k > 0, found digit by digit from the top.
inline Threshold find_threshold(const uint32_t* ranks, int64_t n, int64_t k, uint32_t* counts) {
    uint32_t prefix = 0, mask = 0;
    int64_t needed = k;
    for (int shift = 32 - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        count_digits(ranks, n, prefix, mask, shift, counts);
        uint32_t digit = DIGITS - 1;
        for (; needed > counts[digit]; digit--) needed -= counts[digit];
        prefix |= digit << shift;
        mask |= uint32_t(DIGITS - 1) << shift;
        if (needed == counts[digit]) return {prefix, INT64_MAX};  // the bucket is taken whole
    }
    return {prefix, needed};
}

// Positions of the k best of n into out[0..min(n, k)), ascending.
inline void select_positions(const uint32_t* ranks, int64_t n, int64_t k, uint32_t* counts, int32_t* out) {
    if (n <= k) {
        for (int64_t i = 0; i < n; i++) out[i] = int32_t(i);
        return;
    }
    if (k <= 0) return;
    Threshold least = find_threshold(ranks, n, k, counts);
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
