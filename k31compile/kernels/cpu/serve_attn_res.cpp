// Calls of the two phases of attention over depth.
#include "attn_res_call.h"
#include "call_checks.h"

extern "C" int64_t k31_attn_res_prepare(k31::PrepareCall* call);
extern "C" int64_t k31_attn_res_update(k31::UpdateCall* call);

namespace k31 {
namespace {

// Which blocks count: as they are told, or the leading ones that a single integer names.
class Valid {
  public:
    bool take(const Tensor* given, int64_t blocks) {
        if (!given) return true;
        if (given->kind == IS_BOOL) {
            if (!has_shape(*given, {blocks}) || (given->strides[0] != 1 && blocks != 1)) return false;
            data_ = reinterpret_cast<const uint8_t*>(given->data);
            return true;
        }
        Integers count;
        if (count_of(*given) != 1 || !count.take(*given)) return false;
        own_.reset(new uint8_t[size_t(blocks)]);
        for (int64_t i = 0; i < blocks; i++) own_[size_t(i)] = i < *count.data();
        data_ = own_.get();
        return true;
    }
    const uint8_t* data() const { return data_; }

  private:
    const uint8_t* data_ = nullptr;
    std::unique_ptr<uint8_t[]> own_;
};

}  // namespace

bool serve_attn_res_prepare(Arguments& given, Results& results) {
    const Tensor &bank = given.tensor(), &queries = given.tensor();
    const double eps = given.number();
    const Tensor* valid = given.tensor_or_none();
    if (!given.sound() || bank.dim != 3 || queries.dim != 2 || !is_readable(bank)) return false;
    const int64_t tokens = bank.sizes[0], blocks = bank.sizes[1], width = bank.sizes[2], count = queries.sizes[0];
    Floats32 rows;
    Valid counts;
    if (queries.sizes[1] != width || !rows.take(queries) || !counts.take(valid, blocks)) return false;
    PrepareCall call{};
    call.bank = row_operand(bank);
    call.queries = {reinterpret_cast<const char*>(rows.data()), IS_FLOAT32, 0, 0, width};
    call.valid = counts.data();
    call.tokens = tokens;
    call.blocks = blocks;
    call.queries_count = count;
    call.width = width;
    call.eps = eps;
    call.threads = given.threads();
    call.maximum = reinterpret_cast<float*>(results.add(IS_FLOAT32, {tokens, count}));
    call.total = reinterpret_cast<float*>(results.add(IS_FLOAT32, {tokens, count}));
    call.mixture = reinterpret_cast<float*>(results.add(IS_FLOAT32, {tokens, count, width}));
    return k31_attn_res_prepare(&call) == OK;
}

bool serve_attn_res_update(Arguments& given, Results& results) {
    const Tensor& partial = given.tensor();
    const Tensor* delta = given.tensor_or_none();
    const Tensor &maximum = given.tensor(), &total = given.tensor(), &mixture = given.tensor();
    const Tensor& query = given.tensor();
    const double eps = given.number();
    const Tensor* norm_weight = given.tensor_or_none();
    const double norm_eps = given.number();
    const int64_t mixed_dtype = given.dtype_or(partial.kind);
    if (!given.sound() || partial.dim != 2 || !is_readable(partial)) return false;
    const int64_t tokens = partial.sizes[0], width = partial.sizes[1];
    if (delta && (!is_readable(*delta) || !has_shape(*delta, {tokens, width}))) return false;
    if (norm_weight && (!is_readable(*norm_weight) || !has_shape(*norm_weight, {width}))) return false;
    for (const Tensor* x : {&maximum, &total})
        if (x->kind != IS_FLOAT32 || !has_shape(*x, {tokens})) return false;
    if (mixture.kind != IS_FLOAT32 || !is_readable(mixture) || !has_shape(mixture, {tokens, width})) return false;
    Floats32 numbers;
    if (!has_shape(query, {width}) || !numbers.take(query)) return false;
    UpdateCall call{};
    call.partial = row_operand(partial);
    if (delta) call.delta = row_operand(*delta);
    call.maximum = number_operand(maximum);
    call.total = number_operand(total);
    call.mixture = row_operand(mixture);
    call.query = {reinterpret_cast<const char*>(numbers.data()), IS_FLOAT32, 0, 0, 0};
    if (norm_weight) call.norm_weight = row_operand(*norm_weight);
    call.tokens = tokens;
    call.width = width;
    call.eps = eps;
    call.norm_eps = norm_eps;
    call.threads = given.threads();
    call.sum = results.add(partial.kind, {tokens, width});
    call.mixed = results.add(mixed_dtype, {tokens, width});
    call.mixed_dtype = mixed_dtype;
    return k31_attn_res_update(&call) == OK;
}

}  // namespace k31
