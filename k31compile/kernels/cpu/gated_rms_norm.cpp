// k31::gated_rms_norm on the CPU (K3.1 spec 2.3, 3.8): rows for the threads.
#include <omp.h>

#include "gated_rms_norm.h"

namespace k31 {

template <int64_t ACTIVATION, bool GATE_FIRST, int64_t WEIGHT_CAST> struct OverRows {
    static void run(const NormCall& call, int64_t rows, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t number = 0; number < rows; number++)
            GatedRow<ACTIVATION, GATE_FIRST, WEIGHT_CAST>(call, number).run();
    }
};

}  // namespace k31

K31_EXPORT int64_t k31_gated_rms_norm_size() { return sizeof(k31::NormCall); }

K31_EXPORT int64_t k31_gated_rms_norm(k31::NormCall* call) {
    constexpr double OPERATIONS = 16;  // of a number, most of them in the gate
    const int64_t rows = call->outer * call->rows * call->heads;
    const int64_t threads = k31::threads_for(OPERATIONS * double(rows) * double(call->width), call->threads);
    k31::variant_of<k31::OverRows>(*call)(*call, rows, threads);
    return k31::OK;
}
