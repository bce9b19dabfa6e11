// What a call of skinny_linear names.
#pragma once
#include "cache.h"

namespace k31 {

constexpr int64_t MOST_ROWS = 8;  // of x, where the weight is not packed (skinny_linear.py has it too)

struct SkinnyCall {
    Operand x;       // [rows, depth], numbers side by side, rows by outer strides
    Operand weight;  // [outputs, depth], the same, in the dtype of x
    Operand bias;    // [outputs] by heads, or no data
    int64_t rows;
    int64_t outputs;
    int64_t depth;
    int64_t threads;
    char* result;  // [rows, outputs], in the dtype of x
};

}  // namespace k31
