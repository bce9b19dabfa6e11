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

// Frozen sums one by one, in the order of the banks that hold them.
class FrozenSums {
  public:
    // False unless each bank is [tokens, ., width] and readable.
    bool take(const Tensor* first, int64_t banks, int64_t tokens, int64_t width) {
        int64_t room = count();
        for (const Tensor* bank = first; bank != first + banks; bank++) room += bank->dim == 3 ? bank->sizes[1] : 0;
        sums_.reserve(size_t(room));
        for (const Tensor* bank = first; bank != first + banks; bank++) {
            if (bank->dim != 3 || !is_readable(*bank)) return false;
            if (bank->sizes[0] != tokens || bank->last() != width) return false;
            for (int64_t i = 0; i < bank->sizes[1]; i++) {
                char* const data = bank->data + i * bank->strides[1] * size_of(bank->kind);
                sums_.push_back({data, bank->kind, 0, 0, bank->strides[0]});
            }
        }
        return true;
    }
    int64_t count() const { return int64_t(sums_.size()); }
    const Operand* data() const { return sums_.data(); }

  private:
    std::vector<Operand> sums_;
};

// What was prepared for a query: the tensor itself, or its part for one of many.
class Prepared {
  public:
    bool take(const Tensor& x, const int64_t* slot, int64_t queries) {
        tensor_ = x;
        if (!slot) return true;
        if (x.dim < 2 || x.dim > MOST + 1 || x.kind != IS_FLOAT32) return false;
        if (x.sizes[1] != queries || *slot < 0 || *slot >= queries) return false;
        for (int64_t from = 0, to = 0; from < x.dim; from++) {
            if (from == 1) continue;
            sizes_[to] = x.sizes[from];
            strides_[to++] = x.strides[from];
        }
        tensor_ = {x.data + *slot * x.strides[1] * 4, x.kind, x.dim - 1, sizes_, strides_};
        return true;
    }
    const Tensor& tensor() const { return tensor_; }

  private:
    static constexpr int64_t MOST = 2;  // dimensions of a part
    Tensor tensor_{};
    int64_t sizes_[MOST]{}, strides_[MOST]{};
};

// A vector as it lies where the kernel reads it so, else a copy.
bool take_rows(const Tensor& x, Floats32& copy, Operand& rows) {
    if (is_readable(x)) rows = row_operand(x);
    else if (!copy.take(x)) return false;
    else rows = {reinterpret_cast<const char*>(copy.data()), IS_FLOAT32, 0, 0, x.last()};
    return true;
}

}  // namespace

bool serve_attn_res_prepare(Arguments& given, Results& results) {
    const Tensor &bank = given.tensor(), &queries = given.tensor();
    const double eps = given.number();
    const Tensor* valid = given.tensor_or_none();
    const Tensors more = given.tensors_or_none();
    const bool mix = given.flag();
    if (!given.sound() || bank.dim != 3 || queries.dim != 2) return false;
    const int64_t tokens = bank.sizes[0], width = bank.sizes[2], count = queries.sizes[0];
    FrozenSums sums;
    if (!sums.take(&bank, 1, tokens, width) || !sums.take(more.first, more.count, tokens, width)) return false;
    Floats32 rows;
    Valid counts;
    PrepareCall call{};
    if (queries.sizes[1] != width || !take_rows(queries, rows, call.queries)) return false;
    if (!counts.take(valid, sums.count())) return false;
    call.blocks = sums.data();
    call.valid = counts.data();
    call.tokens = tokens;
    call.block_count = sums.count();
    call.query_count = count;
    call.width = width;
    call.eps = eps;
    call.threads = given.threads();
    call.maximum = reinterpret_cast<float*>(results.add(IS_FLOAT32, {tokens, count}));
    call.total = reinterpret_cast<float*>(results.add(IS_FLOAT32, {tokens, count}));
    float*& third = mix ? call.mixture : call.weights;
    third = reinterpret_cast<float*>(results.add(IS_FLOAT32, {tokens, count, mix ? width : sums.count()}));
    return k31_attn_res_prepare(&call) == OK;
}

bool serve_attn_res_update(Arguments& given, Results& results) {
    const Tensor& partial = given.tensor();
    const Tensor* delta = given.tensor_or_none();
    const Tensor* all[] = {&given.tensor(), &given.tensor(), &given.tensor()};
    const Tensor& query = given.tensor();
    const double eps = given.number();
    const Tensor* norm_weight = given.tensor_or_none();
    const double norm_eps = given.number();
    const int64_t mixed_dtype = given.dtype_or(partial.kind);
    const Tensors bank = given.tensors_or_none();
    const int64_t* slot = given.integer_or_none();
    if (!given.sound() || partial.dim != 2 || !is_readable(partial)) return false;
    const int64_t tokens = partial.sizes[0], width = partial.sizes[1];
    if (delta && (!is_readable(*delta) || !has_shape(*delta, {tokens, width}))) return false;
    if (norm_weight && (!is_readable(*norm_weight) || !has_shape(*norm_weight, {width}))) return false;
    Prepared prepared[3];
    const int64_t queries = all[0]->dim > 1 ? all[0]->sizes[1] : 0;
    for (int i = 0; i < 3; i++)
        if (!prepared[i].take(*all[i], slot, queries)) return false;
    const Tensor &maximum = prepared[0].tensor(), &total = prepared[1].tensor(), &mixture = prepared[2].tensor();
    for (const Tensor* x : {&maximum, &total})
        if (x->kind != IS_FLOAT32 || !has_shape(*x, {tokens})) return false;
    FrozenSums sums;
    if (!sums.take(bank.first, bank.count, tokens, width)) return false;
    const int64_t numbers = bank.count ? sums.count() : width;
    if (mixture.kind != IS_FLOAT32 || !is_readable(mixture) || !has_shape(mixture, {tokens, numbers})) return false;
    Floats32 copy;
    UpdateCall call{};
    if (!has_shape(query, {width}) || !take_rows(query, copy, call.query)) return false;
    call.partial = row_operand(partial);
    if (delta) call.delta = row_operand(*delta);
    call.maximum = number_operand(maximum);
    call.total = number_operand(total);
    call.mixture = row_operand(mixture);
    if (norm_weight) call.norm_weight = row_operand(*norm_weight);
    call.blocks = bank.count ? sums.data() : nullptr;
    call.block_count = sums.count();
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
