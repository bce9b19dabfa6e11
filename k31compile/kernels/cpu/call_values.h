// What an operator was called with, as plain data in the order of its schema. `torch_calls.cpp` makes it of torch's
// stack, the functions of serve_*.cpp read it; neither these nor this header need anything of torch.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace k31 {

// What a tensor holds: the dtypes that kernels read, numbered as in calls.py, and the integers that they are told by.
enum Kind : int64_t { IS_FLOAT32 = 0, IS_BFLOAT16 = 1, IS_BOOL = 2, IS_INT32 = 3, IS_INT64 = 4, IS_OTHER = 5 };

struct Tensor {
    char* data;  // null unless it is dense, on the CPU and holds something
    int64_t kind;
    int64_t dim;
    const int64_t* sizes;
    const int64_t* strides;

    int64_t last() const { return sizes[dim - 1]; }
};

struct Value {
    enum Type { NOTHING, TENSOR, TENSORS, INTEGER, NUMBER, WORD, FLAG, UNREAD };
    Type type;
    Tensor tensor;
    const Tensor* tensors;
    int64_t integer;  // or how many tensors, or a flag
    double number;
    std::string_view word;
};

struct Tensors {
    const Tensor* first;
    int64_t count;

    const Tensor& operator[](int64_t i) const { return first[i]; }
    const Tensor* begin() const { return first; }
    const Tensor* end() const { return first + count; }
};

// Reads the values one after the other. What is not as it is asked for makes the whole unsound; what was read of it
// until `sound` is asked may be anything, so that nothing is to be done with it before.
class Arguments {
  public:
    Arguments(const Value* values, int64_t count, int64_t threads)
        : at_(values), end_(values + count), threads_(threads) {}

    const Tensor& tensor() { return readable(next(Value::TENSOR).tensor); }
    // Null where there is none.
    const Tensor* tensor_or_none() { return is_nothing() ? nullptr : &tensor(); }
    // At least one.
    Tensors tensors() {
        const Value& value = next(Value::TENSORS);
        if (value.integer == 0) sound_ = false;
        for (int64_t i = 0; i < value.integer; i++) readable(value.tensors[i]);
        return {value.tensors, value.integer};
    }
    // None of them where there is no list.
    Tensors tensors_or_none() { return is_nothing() ? Tensors{nullptr, 0} : tensors(); }
    int64_t integer() { return next(Value::INTEGER).integer; }
    const int64_t* integer_or_none() { return is_nothing() ? nullptr : &next(Value::INTEGER).integer; }
    double number() { return next(Value::NUMBER).number; }
    const double* number_or_none() { return is_nothing() ? nullptr : &next(Value::NUMBER).number; }
    bool flag() { return next(Value::FLAG).integer; }
    std::string_view word() { return next(Value::WORD).word; }
    // The place of a word in a list of those that are allowed.
    int64_t word_of(std::initializer_list<std::string_view> allowed) {
        const std::string_view given = word();
        int64_t place = 0;
        for (const std::string_view& one : allowed) {
            if (one == given) return place;
            place++;
        }
        sound_ = false;
        return 0;
    }
    // A dtype that kernels write.
    int64_t dtype_or(int64_t otherwise) {
        if (is_nothing()) return otherwise;
        const int64_t kind = kind_of_dtype(integer());
        if (kind != IS_FLOAT32 && kind != IS_BFLOAT16) sound_ = false;
        return kind;
    }

    int64_t threads() const { return threads_; }
    // Whether all was as it was asked for, and nothing is left.
    bool sound() const { return sound_ && at_ == end_; }

    // Numbers of torch's ScalarType.
    static constexpr int64_t kind_of_dtype(int64_t dtype) {
        return dtype == 6    ? IS_FLOAT32
               : dtype == 15 ? IS_BFLOAT16
               : dtype == 11 ? IS_BOOL
               : dtype == 3  ? IS_INT32
               : dtype == 4  ? IS_INT64
                             : IS_OTHER;
    }

  private:
    bool is_nothing() {
        if (at_ == end_ || at_->type != Value::NOTHING) return false;
        at_++;
        return true;
    }
    const Value& next(Value::Type type) {
        static constexpr Value none{};
        if (at_ != end_ && at_->type == type) return *at_++;
        sound_ = false;
        return none;
    }
    const Tensor& readable(const Tensor& tensor) {
        if (!tensor.data) sound_ = false;
        return tensor;
    }

    const Value* at_;
    const Value* end_;
    int64_t threads_;
    bool sound_ = true;
};

// The tensors that a call gives, in the order of the schema.
class Results {
  public:
    // Memory for a new one, contiguous and not written to.
    virtual char* add(int64_t kind, const int64_t* sizes, int64_t dim) = 0;
    char* add(int64_t kind, std::initializer_list<int64_t> sizes) {
        return add(kind, sizes.begin(), int64_t(sizes.size()));
    }

  protected:
    ~Results() = default;
};

// Serves a call by its kernel, or does nothing and says so: then Python serves it, which checks, copies and refuses.
using Serve = bool (*)(Arguments& given, Results& results);

bool serve_lightning_indexer(Arguments& given, Results& results);
bool serve_sparse_flash_attention(Arguments& given, Results& results);
bool serve_kda_recurrent(Arguments& given, Results& results);
bool serve_kda_recurrent_in_place(Arguments& given, Results& results);
bool serve_kda_chunk(Arguments& given, Results& results);
bool serve_gated_delta_recurrent(Arguments& given, Results& results);
bool serve_gated_delta_chunk(Arguments& given, Results& results);
bool serve_attn_res_prepare(Arguments& given, Results& results);
bool serve_attn_res_update(Arguments& given, Results& results);
bool serve_short_conv(Arguments& given, Results& results);
bool serve_gated_rms_norm(Arguments& given, Results& results);
bool serve_skinny_linear(Arguments& given, Results& results);
bool serve_mega_kda(Arguments& given, Results& results);
bool serve_mega_kda_in_place(Arguments& given, Results& results);
bool serve_moe_gating_top_k(Arguments& given, Results& results);
bool serve_grouped_experts(Arguments& given, Results& results);

}  // namespace k31
