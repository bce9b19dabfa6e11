// What both operators share: a cache seen through strides or a block table, who sees how much of it, and scratch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "tile.h"

namespace k31 {

enum Status : int64_t { OK = 0, BAD_BLOCK = 1, BAD_INDEX = 2, NO_MEMORY = 3 };

// Every struct that crosses the C boundary has 8-byte members only; calls.py mirrors them field by field.
struct Operand {
    const char* data;
    int64_t dtype;
    int64_t stride_outer;  // request or block, in numbers
    int64_t stride_row;    // query row, or position within the request or block
    int64_t stride_head;
};

struct Paging {
    const int64_t* table;  // null: the cache is one piece per request
    int64_t table_stride;
    int64_t blocks;
    int64_t page;
};

struct Lengths {
    const int64_t* query;  // null: every row is real
    const int64_t* key;    // null: the whole cache
    int64_t key_per_row;
    int64_t causal;
    int64_t batch;
    int64_t rows;
    int64_t limit;

    // K3.1 spec 2.8: the first `visible` positions of request b are what row i sees.
    int64_t visible(int64_t b, int64_t i) const {
        const int64_t real = query ? std::clamp<int64_t>(query[b], 0, rows) : rows;
        if (i >= real) return 0;
        const int64_t length = !key ? limit : key_per_row ? key[b * rows + i] : key[b];
        // Clamped last: a padded chunk at the end of a cache has a length beyond it, and its first rows are real.
        return std::clamp<int64_t>(causal ? length - real + 1 + i : length, 0, limit);
    }
};

constexpr int64_t BOOLEAN = 2;     // beside the dtypes of numbers; only a mask has it
constexpr float HIDES = -1e30f;    // what a float mask adds to hide, or less (visibility.py)

// What a mask says of one row's positions.
struct MaskRow {
    const char* data;
    int64_t dtype;
    int64_t stride;

    K31_INLINE bool is_float() const { return data && dtype != BOOLEAN; }
    K31_INLINE float bias(int64_t position) const { return element_of(data, dtype, position * stride); }
    K31_INLINE bool hides(int64_t position) const {
        if (!data) return false;
        return dtype == BOOLEAN ? !data[position * stride] : bias(position) <= HIDES;
    }
};

// [request, row, position]; null where nothing is masked.
struct Mask {
    const char* data;
    int64_t dtype;
    int64_t stride_outer;
    int64_t stride_row;
    int64_t stride_key;

    K31_INLINE MaskRow row(int64_t b, int64_t i) const {
        const int64_t size = dtype == BOOLEAN ? 1 : size_of(dtype);
        return {data ? data + (b * stride_outer + i * stride_row) * size : nullptr, dtype, stride_key};
    }
};

// Positions of one request, and where each of them lies.
struct RequestCache {
    const Paging& paging;
    int64_t request;

    K31_INLINE int64_t block(int64_t position) const {
        return paging.table[request * paging.table_stride + position / paging.page];
    }
    K31_INLINE bool exists(int64_t position) const {
        return !paging.table || (block(position) >= 0 && block(position) < paging.blocks);
    }
    K31_INLINE const char* row(const Operand& cache, int64_t position, int64_t head) const {
        const int64_t outer = paging.table ? block(position) : request;
        const int64_t inner = paging.table ? position % paging.page : position;
        const int64_t offset = outer * cache.stride_outer + inner * cache.stride_row + head * cache.stride_head;
        return cache.data + offset * size_of(cache.dtype);
    }
};

// Rows of one head at consecutive positions, without a division for each of them.
class RowWalk {
  public:
    RowWalk(const RequestCache& cache, const Operand& operand, int64_t position, int64_t head)
        : cache_(cache), operand_(operand), position_(position), head_(head) {}

    K31_INLINE const char* next() {
        if (left_ == 0) enter();
        const char* row = row_;
        row_ += operand_.stride_row * size_of(operand_.dtype);
        left_--;
        position_++;
        return row;
    }

  private:
    void enter() {
        row_ = cache_.row(operand_, position_, head_);
        left_ = cache_.paging.table ? cache_.paging.page - position_ % cache_.paging.page : INT64_MAX;
    }

    const RequestCache& cache_;
    const Operand& operand_;
    int64_t position_, head_, left_ = 0;
    const char* row_ = nullptr;
};

K31_INLINE void prefetch(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// The same into the outer caches only: what is fetched into the nearest one takes the places that its misses wait in.
K31_INLINE void prefetch_far(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 1);
}

// One piece of memory per call, shared out among its threads. A calling thread keeps its piece for its next call
// (fresh pages cost more than a small decode step) unless it is large, and frees it when it ends.
class Scratch {
  public:
    explicit Scratch(int64_t bytes) {
        Kept& kept = mine();
        if (kept.bytes < bytes) {
            std::free(kept.base);
            kept.bytes = round_up(bytes + 1, 4096);
            kept.base = static_cast<char*>(std::aligned_alloc(64, size_t(kept.bytes)));
            if (!kept.base) kept.bytes = 0;
        }
        base_ = kept.base;
    }
    ~Scratch() {
        if (mine().bytes > KEEP_AT_MOST) mine().release();
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    explicit operator bool() const { return base_ != nullptr; }
    char* base() const { return base_; }

  private:
    static constexpr int64_t KEEP_AT_MOST = 8 << 20;
    struct Kept {
        char* base = nullptr;
        int64_t bytes = 0;
        void release() {
            std::free(base);
            base = nullptr;
            bytes = 0;
        }
        ~Kept() { release(); }
    };
    static Kept& mine() {
        thread_local Kept kept;
        return kept;
    }

    char* base_;  // the calling thread's, whichever thread asks
};

// Hands out aligned parts of a scratch; with a null base it only adds up how much is needed.
class Carver {
  public:
    explicit Carver(char* base) : base_(base) {}
    template <class T> T* take(int64_t count) {
        T* part = reinterpret_cast<T*>(base_ ? base_ + used_ : nullptr);
        used_ += round_up(count * int64_t(sizeof(T)), 64);
        return part;
    }
    int64_t used() const { return used_; }

  private:
    char* base_;
    int64_t used_ = 0;
};

}  // namespace k31
