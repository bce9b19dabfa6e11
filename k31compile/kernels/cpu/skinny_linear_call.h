// What a call of skinny_linear names.
#pragma once
#include "cache.h"

namespace k31 {

constexpr int64_t MOST_ROWS = 8;  // of x: more are worth packing (calls.py has it too)

struct SkinnyCall {
    Operand x;       // [rows, depth], bfloat16, numbers side by side, rows by outer strides
    Operand weight;  // [outputs, depth], the same
    Operand bias;    // [outputs] by heads, or no data
    int64_t rows;
    int64_t outputs;
    int64_t depth;
    int64_t threads;
    uint16_t* result;  // [rows, outputs]
};

}  // namespace k31
