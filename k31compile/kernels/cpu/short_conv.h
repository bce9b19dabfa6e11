// What a call of the short convolution names (K3.1 spec 2.6), and the convolution of one request for other kernels.
#pragma once
#include "cache.h"

namespace k31 {

struct ConvCall {
    Operand x;       // [B, T, C]; "head" is the channel
    Operand weight;  // [., C, W]
    Operand bias;    // [., ., C], no data: none
    Operand state;   // [B, W-1, C], no data: zeros
    const int64_t* lengths;
    int64_t batch;
    int64_t tokens;
    int64_t channels;
    int64_t taps;
    int64_t activation;
    int64_t threads;
    char* result;
    char* new_state;
    int64_t state_dtype;
};

// The first request of a call, its state included, by the calling thread alone; the scratch is as large as is said.
int64_t scratch_of_one_request(const ConvCall& call);
void convolve_one_request(const ConvCall& call, char* scratch);

}  // namespace k31
