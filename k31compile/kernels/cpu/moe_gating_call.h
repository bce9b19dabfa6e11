// What a call of moe_gating_top_k names (K3.1 spec 2.18).
#pragma once
#include "cache.h"

namespace k31 {

struct GatingCall {
    Operand x;
    const float* bias;  // null: none
    int64_t rows;
    int64_t experts;
    int64_t count;
    int64_t groups;
    int64_t kept_groups;
    int64_t two_best;
    int64_t renorm;
    int64_t sigmoid;
    double group_fill;
    double factor;
    double eps;
    int64_t threads;
    float* weights;
    int32_t* chosen;
};

}  // namespace k31
