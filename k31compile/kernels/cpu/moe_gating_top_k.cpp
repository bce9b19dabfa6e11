// k31::moe_gating_top_k on the CPU (K3.1 spec 2.18): one row of logits after the other, all of it in the first-level
// cache.
#include <omp.h>

#include <algorithm>

#include "activation.h"
#include "moe_gating_call.h"
#include "select.h"

namespace k31 {
namespace {

constexpr double WORTH_A_THREAD = 1e5;  // logits below which waking a thread costs more than it saves

struct Router {
    float* scores;    // whole vectors of experts or groups, as choice, values and ranks
    float* choice;
    float* values;    // of the groups
    uint32_t* ranks;
    int32_t* best;    // the groups, then the experts that are taken
    bool* kept;       // by group

    static Router carve(Carver& from, const GatingCall& call) {
        const int64_t padded = round_up(call.experts, LANES);  // there are no more groups than experts
        return {from.take<float>(padded), from.take<float>(padded),   from.take<float>(padded),
                from.take<uint32_t>(padded), from.take<int32_t>(padded), from.take<bool>(call.groups)};
    }

    void read(const GatingCall& call, int64_t row) {
        const char* from = call.x.data + row * call.x.stride_outer * size_of(call.x.dtype);
        copy_row(FloatDot{}, from, call.x.dtype, call.experts, reinterpret_cast<char*>(scores));
        std::fill(scores + call.experts, scores + round_up(call.experts, LANES), -__builtin_inff());
    }

    void normalise(const GatingCall& call) {
        if (call.sigmoid) {
            for (int64_t e = 0; e < call.experts; e += LANES) store(scores + e, sigmoid(load<Floats>(scores + e)));
            return;
        }
        Floats top = splat(-__builtin_inff()), total{};
        for (int64_t e = 0; e < call.experts; e += LANES) top = larger(top, load<Floats>(scores + e));
        float lane[LANES];
        store(lane, top);
        const float base = *std::max_element(lane, lane + LANES);
        for (int64_t e = 0; e < call.experts; e += LANES) {
            const Floats weight = exp_negative(load<Floats>(scores + e) - base);
            total += weight;
            store(scores + e, weight);
        }
        const float sum = sum_lanes(total);
        for (int64_t e = 0; e < call.experts; e += LANES) store(scores + e, load<Floats>(scores + e) / sum);
    }

    void choose(const GatingCall& call) {
        for (int64_t e = 0; e < call.experts; e++) choice[e] = call.bias ? scores[e] + call.bias[e] : scores[e];
        if (call.groups > 1) fill_other_groups(call);
        take_best(choice, call.experts, call.count);
    }

    void write(const GatingCall& call, int64_t row) const {
        float* weights = call.weights + row * call.count;
        float sum = 0.0f;
        for (int64_t j = 0; j < call.count; j++) {
            const int32_t expert = best[j];
            call.chosen[row * call.count + j] = expert;
            weights[j] = scores[expert];
            sum += weights[j];
        }
        const float divisor = call.renorm ? sum + float(call.eps) : 1.0f;
        for (int64_t j = 0; j < call.count; j++) weights[j] = weights[j] / divisor * float(call.factor);
    }

  private:
    void take_best(const float* of, int64_t n, int64_t k) {
        for (int64_t i = 0; i < n; i += LANES) store(ranks + i, ranks_of(load<Floats>(of + i)));
        insert_best(ranks, n, k, best);
    }

    // The sum of the two largest, or the largest; NaN where there is one.
    static float value_of(const float* group, int64_t size, bool two_best) {
        float first = -__builtin_inff(), second = first;
        for (int64_t i = 0; i < size; i++) {
            if (group[i] != group[i]) return group[i];
            second = std::max(second, std::min(first, group[i]));
            first = std::max(first, group[i]);
        }
        return two_best ? first + second : first;
    }

    void fill_other_groups(const GatingCall& call) {
        const int64_t size = call.experts / call.groups;
        for (int64_t g = 0; g < call.groups; g++) values[g] = value_of(choice + g * size, size, call.two_best);
        take_best(values, call.groups, call.kept_groups);
        std::fill(kept, kept + call.groups, false);
        for (int64_t g = 0; g < call.kept_groups; g++) kept[best[g]] = true;
        for (int64_t g = 0; g < call.groups; g++)
            if (!kept[g]) std::fill(choice + g * size, choice + (g + 1) * size, float(call.group_fill));
    }
};

int64_t run(const GatingCall& call) {
    const double work = double(call.rows) * double(call.experts);
    const int64_t threads = work < WORTH_A_THREAD ? 1 : std::max<int64_t>(call.threads, 1);
    Carver measure(nullptr);
    Router::carve(measure, call);
    const Scratch scratch(measure.used() * threads);
    if (!scratch) return NO_MEMORY;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < call.rows; row++) {
        Carver carver(scratch.base() + omp_get_thread_num() * measure.used());
        Router router = Router::carve(carver, call);
        router.read(call, row);
        router.normalise(call);
        router.choose(call);
        router.write(call, row);
    }
    return OK;
}

}  // namespace
}  // namespace k31

K31_EXPORT int64_t k31_moe_gating_size() { return sizeof(k31::GatingCall); }

K31_EXPORT int64_t k31_moe_gating(k31::GatingCall* call) { return k31::run(*call); }
