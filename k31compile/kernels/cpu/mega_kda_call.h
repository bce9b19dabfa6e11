// What a call of mega_kda names (K3.1 spec 2.3 to 2.6).
#pragma once
#include "cache.h"

namespace k31 {

constexpr int STREAMS = 3;  // query, key, value

struct MegaCall {
    Operand x[STREAMS];           // [B, T, C]; "head" is the channel
    Operand weight[STREAMS];      // [., C, W]
    Operand conv_state[STREAMS];  // [B, W-1, C], no data: zeros
    Operand raw_gate;             // [B, T, H, K]
    Operand a_log;                // [., ., H]
    Operand dt_bias;              // [., ., H, K], no data: none
    Operand raw_beta;             // [B, T, H]
    Operand state;                // [B, row, H, number], as it is laid out
    Operand out_gate;             // [B, T, H, V]
    Operand norm_weight;          // [., ., H, V]
    int64_t batch;
    int64_t tokens;
    int64_t heads;
    int64_t width;
    int64_t depth;
    int64_t taps;
    int64_t softplus;  // the gate is not bounded
    int64_t value_first;
    int64_t beta_dtype;  // what the sigmoid of beta is rounded to
    int64_t core_dtype;  // what the recurrence's output is rounded to
    int64_t activation;
    int64_t gate_first;
    int64_t weight_cast;
    double lower_bound;
    double l2_eps;
    double beta_factor;
    double scale;
    double norm_eps;
    int64_t threads;
    char* result;  // [B][T][H][V]
    int64_t result_dtype;
    char* new_conv;  // [B][W-1][query's channels, key's, value's]
    int64_t conv_dtype;
    float* last;  // [B][H], then as value_first says; null: in place of the state, which is float32
    const int64_t* places;  // which of the states is a request's, from 0; null: the one of its number

    int64_t size(int stream) const { return stream == STREAMS - 1 ? depth : width; }
    int64_t channels() const { return heads * (2 * width + depth); }
};

}  // namespace k31
