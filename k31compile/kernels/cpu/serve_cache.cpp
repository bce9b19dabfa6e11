// Calls of the operators that read a cache of keys: lightning_indexer and sparse_flash_attention.
#include "attention_block.h"
#include "call_checks.h"
#include "indexer_call.h"

extern "C" int64_t k31_lightning_indexer(k31::IndexerCall* call);
extern "C" int64_t k31_sparse_attention(k31::AttentionCall* call);

namespace k31 {
namespace {

constexpr int64_t FULL = 0, CAUSAL = 3;  // sparse_mode

// Who sees what of a cache, as visibility.py and paging.py have it.
struct View {
    Integers table, query_lengths, key_lengths;
    Paging paging{};
    Lengths lengths{};
    Mask mask{};

    bool take_cache(const Tensor& cache, int64_t batch, const Tensor* blocks, bool paged) {
        if (cache.dim != 4 || paged != (blocks != nullptr)) return false;
        lengths.limit = cache.sizes[1];
        if (!paged) return cache.sizes[0] == batch;
        if (blocks->dim != 2 || blocks->sizes[0] != batch || !table.take(*blocks)) return false;
        paging = {table.data(), blocks->sizes[1], cache.sizes[0], cache.sizes[1]};
        lengths.limit *= blocks->sizes[1];
        return true;
    }

    bool take_lengths(int64_t batch, int64_t rows, const Tensor* query, const Tensor* key, int64_t mode) {
        if (mode != FULL && mode != CAUSAL) return false;
        if (query && !has_shape(*query, {batch})) return false;
        lengths.key_per_row = key && key->dim == 2;
        if (lengths.key_per_row && (mode != FULL || !has_shape(*key, {batch, rows}))) return false;
        if (key && !lengths.key_per_row && !has_shape(*key, {batch})) return false;
        if (!query_lengths.take(query) || !key_lengths.take(key)) return false;
        lengths.query = query_lengths.data();
        lengths.key = key_lengths.data();
        lengths.causal = mode == CAUSAL;
        lengths.batch = batch;
        lengths.rows = rows;
        return true;
    }

    bool take_mask(const Tensor* given) {
        if (!given) return true;
        const int64_t full[] = {lengths.batch, lengths.rows, lengths.limit};
        if (given->dim != 3 || (!is_number(*given) && given->kind != IS_BOOL)) return false;
        int64_t strides[3];
        for (int i = 0; i < 3; i++) {
            if (given->sizes[i] != 1 && given->sizes[i] != full[i]) return false;
            strides[i] = given->sizes[i] == 1 ? 0 : given->strides[i];
        }
        mask = {given->data, given->kind, strides[0], strides[1], strides[2]};
        return true;
    }
};

bool same_rows(const Tensor& x, const Tensor& other) { return x.dim == 4 && std::equal(x.sizes, x.sizes + 3, other.sizes); }

}  // namespace

bool serve_lightning_indexer(Arguments& given, Results& results) {
    const Tensor &query = given.tensor(), &key = given.tensor(), &weights = given.tensor();
    const Tensor *query_lengths = given.tensor_or_none(), *key_lengths = given.tensor_or_none();
    const Tensor* table = given.tensor_or_none();
    given.word_of({"BSND"});
    const bool paged = given.word_of({"BSND", "PA_BSND"});
    const int64_t count = given.integer(), mode = given.integer();
    const bool by_score = given.word_of({"position", "score"}), fill_lowest = given.word_of({"minus_one", "lowest"});
    const Tensor* mask = given.tensor_or_none();
    if (!given.sound() || query.dim != 4 || count < 1) return false;
    const int64_t batch = query.sizes[0], rows = query.sizes[1], heads = query.sizes[2], width = query.sizes[3];
    View view;
    if (!is_readable(query) || !is_readable(key) || !is_number(weights)) return false;
    if (!view.take_cache(key, batch, table, paged) || key.sizes[2] != 1 || key.sizes[3] != width) return false;
    if (!has_shape(weights, {batch, rows, heads})) return false;
    if (!view.take_lengths(batch, rows, query_lengths, key_lengths, mode) || !view.take_mask(mask)) return false;
    if (fill_lowest && count > view.lengths.limit) return false;
    char* const result = results.add(IS_INT32, {batch, rows, 1, count});
    IndexerCall call{operand(query), operand(key), operand(weights), view.paging, view.lengths, view.mask, heads, width,
                     count, by_score, fill_lowest, given.threads(), reinterpret_cast<int32_t*>(result), 0};
    return k31_lightning_indexer(&call) == OK;
}

bool serve_sparse_flash_attention(Arguments& given, Results& results) {
    const Tensor &query = given.tensor(), &key = given.tensor(), &value = given.tensor(), &indices = given.tensor();
    const double scale = given.number();
    const Tensor* table = given.tensor_or_none();
    const Tensor *query_lengths = given.tensor_or_none(), *key_lengths = given.tensor_or_none();
    const Tensor *query_rope = given.tensor_or_none(), *key_rope = given.tensor_or_none();
    const int64_t block_size = given.integer();
    given.word_of({"BSND"});
    const bool paged = given.word_of({"BSND", "PA_BSND"});
    const int64_t mode = given.integer(), attention_mode = given.integer();
    const Tensor* mask = given.tensor_or_none();
    if (!given.sound() || block_size != 1 || (attention_mode != 0 && attention_mode != 2)) return false;
    if (query.dim != 4 || !is_readable(query) || !is_readable(key) || !is_readable(value)) return false;
    const int64_t batch = query.sizes[0], rows = query.sizes[1], heads = query.sizes[2], width = query.sizes[3];
    View view;
    if (!view.take_cache(key, batch, table, paged) || !same_rows(value, key) || key.sizes[3] != width) return false;
    const int64_t groups = key.sizes[2], depth = value.sizes[3];
    if (heads % groups || (attention_mode == 2 && groups != 1)) return false;
    if ((indices.kind != IS_INT32 && indices.kind != IS_INT64) || indices.dim != 4) return false;
    const int64_t count = indices.sizes[3];
    if (!has_shape(indices, {batch, rows, 1, count}) || (indices.strides[3] != 1 && count != 1)) return false;
    if ((query_rope != nullptr) != (key_rope != nullptr)) return false;
    if (query_rope) {
        if (!is_readable(*query_rope) || !is_readable(*key_rope)) return false;
        if (!same_rows(*query_rope, query) || !same_rows(*key_rope, key)) return false;
        if (query_rope->sizes[3] != key_rope->sizes[3]) return false;
    }
    if (!view.take_lengths(batch, rows, query_lengths, key_lengths, mode) || !view.take_mask(mask)) return false;
    char* const result = results.add(query.kind, {batch, rows, heads, depth});
    AttentionCall call{};
    call.query = operand(query);
    call.key = operand(key);
    call.value = operand(value);
    if (query_rope) {
        call.query_rope = operand(*query_rope);
        call.key_rope = operand(*key_rope);
        call.rope_width = query_rope->sizes[3];
    }
    call.paging = view.paging;
    call.lengths = view.lengths;
    call.mask = view.mask;
    call.indices = indices.data;
    call.index_bytes = indices.kind == IS_INT64 ? 8 : 4;
    call.index_stride_request = indices.strides[0];
    call.index_stride_row = indices.strides[1];
    call.count = count;
    call.heads = heads;
    call.groups = groups;
    call.width = width;
    call.value_width = depth;
    call.scale = scale;
    call.threads = given.threads();
    call.result = result;
    call.result_dtype = query.kind;
    return k31_sparse_attention(&call) == OK;
}

}  // namespace k31
