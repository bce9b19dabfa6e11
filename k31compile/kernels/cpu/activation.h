// Activations of LANES numbers, within a few ulp of the exact ones; a NaN stays one.
#pragma once
#include "simd.h"

namespace k31 {

K31_INLINE Floats absolute(Floats x) { return bits<Floats>(bits<Words>(x) & 0x7fffffffu); }

K31_INLINE Floats sigmoid(Floats x) {
    const Floats shrunk = exp_negative(-absolute(x));
    return (x < 0.0f ? shrunk : splat(1.0f)) / (shrunk + 1.0f);
}

K31_INLINE Floats tanh(Floats x) {
    const Floats size = absolute(x), shrunk = exp_negative(size * -2.0f);
    const Words sign = bits<Words>(x) & 0x80000000u;
    const Floats large = bits<Floats>(bits<Words>((1.0f - shrunk) / (shrunk + 1.0f)) | sign);
    // Near zero that difference would cancel: there an odd polynomial, fitted for the least relative error.
    const Floats z = x * x;
    Floats p = z * -5.704985e-3f + 2.0639084e-2f;
    p = p * z - 5.3739715e-2f;
    p = p * z + 1.3331442e-1f;
    p = p * z - 3.3333281e-1f;
    return size < 0.625f ? x + x * z * p : large;
}

// log(1 + e^x) = max(x, 0) + log(1 + z), z = e^-|x|, and log(1 + z) = 2 artanh(z / (2 + z)): seven terms, as z <= 1.
K31_INLINE Floats softplus(Floats x) {
    const Floats z = exp_negative(-absolute(x)), s = z / (z + 2.0f), square = s * s;
    Floats p = square * (1.0f / 13) + 1.0f / 11;
    p = p * square + 1.0f / 9;
    p = p * square + 1.0f / 7;
    p = p * square + 1.0f / 5;
    p = p * square + 1.0f / 3;
    return (x < 0.0f ? Floats{} : x) + 2.0f * (s * square * p + s);
}

enum Activation : int64_t { NONE = 0, SIGMOID = 1, SILU = 2 };

// The activation of x; a NaN stays one.
K31_INLINE Floats activated(int64_t activation, Floats x) {
    if (activation == NONE) return x;
    const Floats small = exp_negative(bits<Floats>(bits<Words>(x) | 0x80000000u));  // e^-|x|
    const Floats one = splat(1.0f), share = x < Floats{} ? small : one;
    return (activation == SILU ? x * share : share) / (one + small);
}

}  // namespace k31
