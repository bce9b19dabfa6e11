// The activations of gates, with one exponential that cannot overflow.
#pragma once
#include "simd.h"

namespace k31 {

enum Activation : int64_t { NONE = 0, SIGMOID = 1, SILU = 2 };

// The activation of x; a NaN stays one.
K31_INLINE Floats activated(int64_t activation, Floats x) {
    if (activation == NONE) return x;
    const Floats small = exp_negative(bits<Floats>(bits<Words>(x) | 0x80000000u));  // e^-|x|
    const Floats one = splat(1.0f), share = x < Floats{} ? small : one;
    return (activation == SILU ? x * share : share) / (one + small);
}

}  // namespace k31
