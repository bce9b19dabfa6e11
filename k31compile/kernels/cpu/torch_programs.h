// Programs of built libraries as calls of torch's.
#pragma once

namespace k31 {

// Let torch find the kernels of the operators that kernels/programs.py defines; whether it did.
bool serve_programs();

}  // namespace k31
