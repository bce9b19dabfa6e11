// k31::short_conv on the CPU (K3.1 spec 2.6): tasks for the threads.
#include <omp.h>

#include "short_conv.h"

namespace k31 {

constexpr int64_t TOKENS_PER_TASK = 256;  // packing a task's weights must be little beside using them

// A task is a chunk of channels and a run of tokens, which may cross from one request to the next.
int64_t run_tasks(const ConvCall& call, char* base, int64_t stride, int64_t threads) {
    const int64_t all = call.batch * call.tokens, runs = (all + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK;
#pragma omp parallel num_threads(threads)
    {
        Carver carver(base + omp_get_thread_num() * stride);
        ConvTile tile(carver, call);
        const int64_t chunks = tile.chunks();
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t task = 0; task < chunks * runs; task++) {
            tile.choose(task % chunks);
            tile.pack();
            const int64_t start = task / chunks * TOKENS_PER_TASK, end = std::min(start + TOKENS_PER_TASK, all);
            for (int64_t token = start; token < end;) {
                const int64_t request = token / call.tokens, from = token % call.tokens;
                const int64_t to = std::min(call.tokens, from + end - token);
                if (call.taps == COMMON_TAPS) tile.run<COMMON_TAPS>(request, from, to);
                else tile.run<0>(request, from, to);
                token += to - from;
            }
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < chunks * call.batch; task++) {
            tile.choose(task % chunks);
            tile.keep(task / chunks);
        }
    }
    return OK;
}

}  // namespace k31

K31_EXPORT int64_t k31_short_conv_size() { return sizeof(k31::ConvCall); }

K31_EXPORT int64_t k31_short_conv(k31::ConvCall* call) {
    constexpr double ACTIVATION = 12;  // operations
    const double numbers = double(call->batch) * double(call->tokens) * double(call->channels);
    const int64_t threads = k31::threads_for(numbers * (double(call->taps) + ACTIVATION), call->threads);
    k31::Carver measure(nullptr);
    k31::ConvTile(measure, *call);
    const k31::Scratch scratch(measure.used() * threads);
    if (!scratch) return k31::NO_MEMORY;
    return k31::run_tasks(*call, scratch.base(), measure.used(), threads);
}
