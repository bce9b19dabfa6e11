// k31::mega_kda on the CPU (K3.1 spec 2.3 to 2.6): one strand, a request's head, from its channels of the convolution
// to its rows of the gated norm. What passes from one part to the next never leaves the nearest caches.
#include <omp.h>

#include "activation.h"
#include "delta_step.h"
#include "gated_rms_norm.h"
#include "mega_kda_call.h"
#include "numbers.h"
#include "short_conv.h"

namespace k31 {

inline Operand moved(Operand from, int64_t numbers) {
    if (from.data) from.data += numbers * size_of(from.dtype);
    return from;
}

// Rows of `width` numbers, one after the other.
inline Operand packed(const void* data, int64_t dtype, int64_t width) {
    return {static_cast<const char*>(data), dtype, 0, width, 0};
}

// The scratch of a thread, and the parts in their order; each leaves one row a token for the next.
struct Layer {
    const MegaCall& call;
    char* convolved[STREAMS];             // [T][K or V] in the dtype of x
    char *kept, *tile;                    // of one convolution: its state, its scratch
    float *query, *key, *gate, *beta;     // [T][K], beta [T]
    float* core;                          // [T][V]
    char* rounded_core;                   // [V]
    Step step;
    int64_t request = 0, head = 0;

    Layer(Carver& from, const MegaCall& of) : call(of), step(steps(from, of)) {
        const int64_t tokens = of.tokens, widest = std::max(of.width, of.depth);
        for (int s = 0; s < STREAMS; s++) convolved[s] = from.take<char>(tokens * of.size(s) * 4);
        kept = from.take<char>((of.taps - 1) * widest * 4);
        for (float** row : {&query, &key, &gate}) *row = from.take<float>(tokens * of.width);
        beta = from.take<float>(tokens);
        core = from.take<float>(tokens * of.depth);
        rounded_core = from.take<char>(of.depth * 2);
        int64_t most = 0;
        for (int s = 0; s < STREAMS; s++) most = std::max(most, scratch_of_one_request(convolution(s)));
        tile = from.take<char>(most);
    }

    static Step steps(Carver& from, const MegaCall& of) {
        DeltaCall sizes{};
        sizes.width = of.width;
        sizes.depth = of.depth;
        return Step::carve(from, sizes);
    }

    void run(int64_t number) {
        request = number / call.heads;
        head = number % call.heads;
        for (int s = 0; s < STREAMS; s++) convolve(s);
        normalize(0, query);
        normalize(1, key);
        for (int64_t t = 0; t < call.tokens; t++) open_gates(t);
        recur();
        for (int64_t t = 0; t < call.tokens; t++) finish(t);
    }

    ConvCall convolution(int s) const {
        const int64_t first = head * call.size(s);
        const Operand &x = call.x[s], &state = call.conv_state[s], &weight = call.weight[s];
        return {moved(x, request * x.stride_outer + first * x.stride_head),
                moved(weight, first * weight.stride_row),
                {},
                moved(state, request * state.stride_outer + first * state.stride_head),
                nullptr,
                1,
                call.tokens,
                call.size(s),
                call.taps,
                SILU,
                1,
                convolved[s],
                kept,
                call.conv_dtype};
    }

    void convolve(int s) const {
        const ConvCall conv = convolution(s);
        convolve_one_request(conv, tile);
        const int64_t before = s * call.heads * call.width + head * call.size(s), size = size_of(call.conv_dtype);
        for (int64_t j = 0; j < call.taps - 1; j++) {
            char* to = call.new_conv + ((request * (call.taps - 1) + j) * call.channels() + before) * size;
            std::memcpy(to, kept + j * conv.channels * size, size_t(conv.channels * size));
        }
    }

    // x / sqrt(sum of squares + eps)
    void normalize(int s, float* to) const {
        const int64_t width = call.width, dtype = call.x[s].dtype;
        for (int64_t t = 0; t < call.tokens; t++) {
            const char* row = convolved[s] + t * width * size_of(dtype);
            SumOfSquares squares;
            for (int64_t i = 0; i < width; i += LANES) squares.add(numbers_at(row, dtype, i, width));
            const float factor = 1.0f / __builtin_sqrtf(float(squares.total()) + float(call.l2_eps));
            char* result = reinterpret_cast<char*>(to + t * width);
            for (int64_t i = 0; i < width; i += LANES)
                put_numbers(result, FLOAT32, i, width, numbers_at(row, dtype, i, width) * factor);
        }
    }

    void open_gates(int64_t t) const {
        const Operand &raw = call.raw_gate, &bias = call.dt_bias;
        const char *row = row_of(raw, request, t, head), *shift = row_of(bias, 0, 0, head);
        const float a_log = element_of(row_of(call.a_log, 0, 0, head), call.a_log.dtype, 0);
        const Floats rate = exp_any(splat(a_log));
        char* to = reinterpret_cast<char*>(gate + t * call.width);
        for (int64_t i = 0; i < call.width; i += LANES) {
            Floats shifted = numbers_at(row, raw.dtype, i, call.width);
            if (bias.data) shifted += numbers_at(shift, bias.dtype, i, call.width);
            const Floats decay = call.softplus ? -rate * softplus(shifted)
                                               : float(call.lower_bound) * activated(SIGMOID, rate * shifted);
            put_numbers(to, FLOAT32, i, call.width, decay);
        }
        const float logit = element_of(row_of(call.raw_beta, request, t, head), call.raw_beta.dtype, 0);
        beta[t] = rounded(activated(SIGMOID, splat(logit)), call.beta_dtype)[0] * float(call.beta_factor);
    }

    void recur() {
        const FlushSubnormals flush;
        const DeltaCall rule = delta();
        step.run(Strand(rule, 0));
    }

    DeltaCall delta() const {
        const Operand& state = call.state;
        const int64_t place = call.places ? call.places[request] : request;
        const int64_t numbers = place * state.stride_outer + head * state.stride_head;
        float* last =
            call.last ? call.last + (request * call.heads + head) * call.width * call.depth : nullptr;
        return {packed(query, FLOAT32, call.width),
                packed(key, FLOAT32, call.width),
                packed(convolved[STREAMS - 1], call.x[STREAMS - 1].dtype, call.depth),
                packed(gate, FLOAT32, call.width),
                packed(beta, FLOAT32, 1),
                moved(state, numbers),
                nullptr,
                1,
                call.tokens,
                1,
                call.width,
                call.depth,
                0,
                call.value_first,
                0,
                call.scale,
                1,
                core,
                last,
                nullptr};
    }

    void finish(int64_t t) const {
        const char* x = reinterpret_cast<const char*>(core + t * call.depth);
        if (call.core_dtype != FLOAT32) {
            for (int64_t i = 0; i < call.depth; i += LANES)
                put_numbers(rounded_core, call.core_dtype, i, call.depth, numbers_at(x, FLOAT32, i, call.depth));
            x = rounded_core;
        }
        const Operand &opening = call.out_gate, &weight = call.norm_weight;
        const int64_t place = request * opening.stride_outer + t * opening.stride_row + head * opening.stride_head;
        const int64_t row = (request * call.tokens + t) * call.heads + head;
        const NormCall norm{packed(x, call.core_dtype, call.depth),
                            moved(opening, place),
                            moved(weight, head * weight.stride_head),
                            1,
                            1,
                            1,
                            call.depth,
                            call.activation,
                            call.gate_first,
                            call.weight_cast,
                            call.norm_eps,
                            1,
                            call.result + row * call.depth * size_of(call.result_dtype),
                            call.result_dtype};
        norm_one_row(norm);
    }
};

int64_t run(const MegaCall& call) {
    const int64_t strands = call.batch * call.heads;
    const double rule = 4.0 * double(call.width) * double(call.depth), around = 64.0 * double(call.width + call.depth);
    const int64_t threads = threads_for((rule + around) * double(strands * call.tokens), call.threads);
    Carver measure(nullptr);
    Layer(measure, call);
    const Scratch scratch(measure.used() * threads);
    if (!scratch) return NO_MEMORY;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t number = 0; number < strands; number++) {
        Carver carver(scratch.base() + omp_get_thread_num() * measure.used());
        Layer(carver, call).run(number);
    }
    return OK;
}

}  // namespace k31

K31_EXPORT int64_t k31_mega_kda_size() { return sizeof(k31::MegaCall); }

K31_EXPORT int64_t k31_mega_kda(k31::MegaCall* call) { return k31::run(*call); }
