// What calls of the two phases of attention over depth name (K3.1 spec 2.2).
#pragma once
#include "cache.h"

namespace k31 {

struct PrepareCall {
    Operand queries;       // [., ., Q, D]
    const Operand* blocks;  // each frozen sum by itself, [., ., M, D]
    const uint8_t* valid;
    int64_t tokens;
    int64_t block_count;
    int64_t query_count;
    int64_t width;
    double eps;
    int64_t threads;
    float* maximum;
    float* total;
    float* mixture;  // [M, Q, D], or null: then the weights are asked for
    float* weights;  // [M, Q, N], or null
};

struct UpdateCall {
    Operand partial;      // [., ., M, D], as delta and mixture
    Operand delta;        // no data: none
    Operand maximum;      // [., ., M, 1], float32, as total
    Operand total;
    Operand mixture;      // float32; with blocks their weights [., ., M, N]
    Operand query;        // [., ., ., D]
    Operand norm_weight;  // [., ., ., D], no data: no norm
    const Operand* blocks;  // null: the mixture is there; else each frozen sum by itself, [., ., M, D]
    int64_t block_count;
    int64_t tokens;
    int64_t width;
    double eps;
    double norm_eps;
    int64_t threads;
    char* sum;
    char* mixed;
    int64_t mixed_dtype;
};

// A token's row.
inline const char* row_of(const Operand& from, int64_t token) {
    return from.data ? from.data + token * from.stride_head * size_of(from.dtype) : nullptr;
}

}  // namespace k31
