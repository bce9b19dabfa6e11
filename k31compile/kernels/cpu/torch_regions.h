// Nested regions as calls of torch's.
#pragma once

namespace k31 {

// Let torch find the kernels of the operators that kernels/regions.py defines; whether it did.
bool serve_regions();

}  // namespace k31
