// The delta-rule operators on the CPU (K3.1 spec 2.4, 2.5): one strand, a sequence of one head, after the other; each
// is finished by one thread, so results do not depend on how many there are.
#include <omp.h>

#include "delta_chunk.h"
#include "delta_step.h"

namespace k31 {

constexpr double WORTH_A_THREAD = 1e6;  // multiplications below which waking a thread costs more than it saves
constexpr int64_t WORTH_A_CHUNK = 5;    // tokens from which chunks pay for bringing the state into panels and back

struct DeltaWorker {
    Step step;
    Chunk chunk;

    static DeltaWorker carve(Carver& from, const DeltaCall& call) {
        Step step = Step::carve(from, call);
        return {step, call.by_chunk ? Chunk::carve(from, call) : Chunk{}};
    }
    void run(const Strand& strand) {
        if (strand.call.by_chunk && strand.count >= WORTH_A_CHUNK) chunk.run(strand);
        else step.run(strand);
    }
};

int64_t run(const DeltaCall& call) {
    const int64_t strands = call.sequences * call.heads;
    const double tokens = double(call.limits ? call.tokens : call.sequences * call.tokens);
    const double work = 4.0 * tokens * double(call.heads) * double(call.width) * double(call.depth);
    const int64_t threads = work < WORTH_A_THREAD ? 1 : std::max<int64_t>(call.threads, 1);
    Carver measure(nullptr);
    DeltaWorker::carve(measure, call);
    const Scratch scratch(measure.used() * threads);
    if (!scratch) return NO_MEMORY;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t number = 0; number < strands; number++) {
        const FlushSubnormals flush;
        Carver carver(scratch.base() + omp_get_thread_num() * measure.used());
        DeltaWorker::carve(carver, call).run(Strand(call, number));
    }
    return OK;
}

}  // namespace k31

K31_EXPORT int64_t k31_delta_rule_size() { return sizeof(k31::DeltaCall); }

K31_EXPORT int64_t k31_delta_rule(k31::DeltaCall* call) { return k31::run(*call); }
