// What the functions of serve_*.cpp ask of tensors, and tensors as the kernels' structures have them: the part of
// calls.py and of the checks in Python that the common case needs.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "cache.h"
#include "call_values.h"

namespace k31 {

inline bool is_number(const Tensor& x) { return x.kind == IS_FLOAT32 || x.kind == IS_BFLOAT16; }

inline bool has_shape(const Tensor& x, std::initializer_list<int64_t> sizes) {
    return x.dim == int64_t(sizes.size()) && std::equal(sizes.begin(), sizes.end(), x.sizes);
}

// Numbers that lie side by side along the last dimension.
inline bool is_readable(const Tensor& x) {
    return is_number(x) && x.dim > 0 && (x.strides[x.dim - 1] == 1 || x.last() == 1);
}

inline bool is_contiguous(const Tensor& x) {
    int64_t expected = 1;
    for (int64_t i = x.dim - 1; i >= 0; i--) {
        if (x.sizes[i] != 1 && x.strides[i] != expected) return false;
        expected *= x.sizes[i];
    }
    return true;
}

// Whether a thread's scratch holds the state of a head, as `beyond_scratch` in cpu/delta_rule.py has it.
inline bool fits_scratch(int64_t width, int64_t depth) {
    return width <= 1 << 10 && depth <= 1 << 10 && width * depth <= 1 << 18;
}

inline int64_t count_of(const Tensor& x) {
    int64_t count = 1;
    for (int64_t i = 0; i < x.dim; i++) count *= x.sizes[i];
    return count;
}

// A tensor [outer, row, head, ...].
inline Operand operand(const Tensor& x) { return {x.data, x.kind, x.strides[0], x.strides[1], x.strides[2]}; }

// A tensor [..., number] of up to four dimensions; the leading ones that it lacks have stride 0.
inline Operand row_operand(const Tensor& x) {
    const int64_t before = x.dim - 1;
    return {x.data, x.kind, before > 2 ? x.strides[before - 3] : 0, before > 1 ? x.strides[before - 2] : 0,
            before > 0 ? x.strides[before - 1] : 0};
}

// A tensor [row, number].
inline Operand plane(const Tensor& x) { return {x.data, x.kind, x.strides[0], x.strides[1], 0}; }

// A tensor [head].
inline Operand number_operand(const Tensor& x) { return {x.data, x.kind, 0, 0, x.strides[0]}; }

// A tensor's numbers in a row, in another type where it has not got it or does not lie in a row.
template <class To> class InARow {
  public:
    InARow() = default;
    // Null where there is no tensor.
    const To* data() const { return data_; }

  protected:
    template <class From> void copy(const Tensor& x) {
        const int64_t count = count_of(x);
        own_.reset(new To[size_t(count)]);
        for (int64_t i = 0; i < count; i++) own_[size_t(i)] = To(read_at<From>(x, i));
        data_ = own_.get();
    }
    void see(const Tensor& x) { data_ = reinterpret_cast<const To*>(x.data); }

  private:
    template <class From> static From read_at(const Tensor& x, int64_t index) {
        int64_t offset = 0;
        for (int64_t i = x.dim - 1; i >= 0; i--) {
            offset += index % x.sizes[i] * x.strides[i];
            index /= x.sizes[i];
        }
        return read<From>(x.data + offset * int64_t(sizeof(From)));
    }

    const To* data_ = nullptr;
    std::unique_ptr<To[]> own_;
};

// Lengths and tables as the kernels read them.
class Integers : public InARow<int64_t> {
  public:
    // False where the tensor holds other numbers.
    bool take(const Tensor& x) {
        if (x.kind == IS_INT32) copy<int32_t>(x);
        else if (x.kind != IS_INT64) return false;
        else if (is_contiguous(x)) see(x);
        else copy<int64_t>(x);
        return true;
    }
    bool take(const Tensor* x) { return !x || take(*x); }
};

// Which states of a pool are read and written in place.
class Places : public Integers {
  public:
    // False unless they are states of the pool, one a request and each of them once.
    bool take(const Tensor* rows, int64_t requests, int64_t states) {
        if (!rows) return true;
        if (!has_shape(*rows, {requests}) || !Integers::take(*rows)) return false;
        own_.assign(data(), data() + requests);
        for (int64_t& row : own_) {
            if (row < -states || row >= states) return false;
            if (row < 0) row += states;
        }
        sorted_ = own_;
        std::sort(sorted_.begin(), sorted_.end());
        return std::adjacent_find(sorted_.begin(), sorted_.end()) == sorted_.end();
    }
    // Null where each request has the state of its number.
    const int64_t* places() const { return own_.empty() ? nullptr : own_.data(); }

  private:
    std::vector<int64_t> own_, sorted_;
};

// Whether a kernel may write a state where it lies.
inline bool is_writable(const Tensor& state) {
    return state.kind == IS_FLOAT32 && is_readable(state) &&
           std::find(state.strides, state.strides + state.dim, 0) == state.strides + state.dim;
}

// A bfloat16 number that becomes a float when it is read.
struct Brain {
    uint16_t word;
    explicit operator float() const { return bits<float>(uint32_t(word) << 16); }
};

// Small operands that the kernels read in float32 only.
class Floats32 : public InARow<float> {
  public:
    bool take(const Tensor& x) {
        if (x.kind == IS_BFLOAT16) copy<Brain>(x);
        else if (x.kind != IS_FLOAT32) return false;
        else if (is_contiguous(x)) see(x);
        else copy<float>(x);
        return true;
    }
    bool take(const Tensor* x) { return !x || take(*x); }
};

}  // namespace k31
