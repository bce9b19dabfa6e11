// What calls of the two phases of attention over depth name (K3.1 spec 2.2).
#pragma once
#include "cache.h"

namespace k31 {

struct PrepareCall {
    Operand bank;     // [., M, N, D]
    Operand queries;  // [., ., Q, D], float32
    const uint8_t* valid;
    int64_t tokens;
    int64_t blocks;
    int64_t queries_count;
    int64_t width;
    double eps;
    int64_t threads;
    float* maximum;
    float* total;
    float* mixture;
};

struct UpdateCall {
    Operand partial;      // [., ., M, D], as delta and mixture
    Operand delta;        // no data: none
    Operand maximum;      // [., ., M, 1], float32, as total
    Operand total;
    Operand mixture;      // float32
    Operand query;        // [., ., ., D], float32
    Operand norm_weight;  // [., ., ., D], no data: no norm
    int64_t tokens;
    int64_t width;
    double eps;
    double norm_eps;
    int64_t threads;
    char* sum;
    char* mixed;
    int64_t mixed_dtype;
};

}  // namespace k31
