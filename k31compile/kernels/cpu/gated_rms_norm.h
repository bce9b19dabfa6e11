// What a call of the gated RMS norm names (K3.1 spec 2.3, 3.8), and the norm of one row for other kernels.
#pragma once
#include "cache.h"

namespace k31 {

struct NormCall {
    Operand x;
    Operand gate;
    Operand weight;
    int64_t outer;
    int64_t rows;
    int64_t heads;
    int64_t width;
    int64_t activation;
    int64_t gate_first;
    int64_t weight_cast;
    double eps;
    int64_t threads;
    char* result;
    int64_t result_dtype;
};

inline const char* row_of(const Operand& from, int64_t outer, int64_t row, int64_t head) {
    const int64_t offset = outer * from.stride_outer + row * from.stride_row + head * from.stride_head;
    return from.data + offset * size_of(from.dtype);
}

// The first row of a call.
void norm_one_row(const NormCall& call);

}  // namespace k31
