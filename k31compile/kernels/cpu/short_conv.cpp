// k31::short_conv on the CPU (K3.1 spec 2.6): channels lie across the lanes, taps are added in order.
//
// Rows of channels are read where they lie. What has no such rows (a tensor whose time runs fastest, the inputs in
// the state) goes through a small tile of floats that never leaves the first-level cache.
#include <omp.h>

#include "activation.h"
#include "cache.h"
#include "numbers.h"

namespace k31 {

struct ConvCall {
    Operand x;       // [B, T, C]; "head" is the channel
    Operand weight;  // [., C, W]
    Operand bias;    // [., ., C], no data: none
    Operand state;   // [B, W-1, C], no data: zeros
    const int64_t* lengths;
    int64_t batch;
    int64_t tokens;
    int64_t channels;
    int64_t taps;
    int64_t activation;
    int64_t threads;
    char* result;
    char* new_state;
    int64_t state_dtype;
};

constexpr int64_t CHANNELS = 256;       // of one task
constexpr int64_t TILE_TOKENS = 16;     // outputs that one tile serves
constexpr int64_t TOKENS_PER_TASK = 256;  // packing a task's weights must be little beside using them
constexpr int64_t COMMON_TAPS = 4;

// What one thread works with, for the channels [first, first + count).
struct ConvTile {
    const ConvCall& call;
    float *weight, *bias, *inputs;  // [W][CHANNELS], [CHANNELS], [W - 1 + TILE_TOKENS][CHANNELS]
    int64_t first = 0, count = 0;

    ConvTile(Carver& from, const ConvCall& c)
        : call(c), weight(from.take<float>(c.taps * CHANNELS)), bias(from.take<float>(CHANNELS)),
          inputs(from.take<float>((c.taps - 1 + TILE_TOKENS) * CHANNELS)) {}

    void choose(int64_t chunk) {
        first = chunk * CHANNELS;
        count = std::min(CHANNELS, call.channels - first);
    }

    void pack() {
        const Operand &w = call.weight, &b = call.bias;
        for (int64_t c = 0; c < count; c++) {
            const char* taps = w.data + (first + c) * w.stride_row * size_of(w.dtype);
            for (int64_t i = 0; i < call.taps; i++)
                weight[i * CHANNELS + c] = element_of(taps, w.dtype, i * w.stride_head);
            bias[c] = b.data ? element_of(b.data, b.dtype, (first + c) * b.stride_head) : 0.0f;
        }
    }

    // Row `j` of the window, the state's rows first, as floats.
    void gather(int64_t request, int64_t j, float* to) const {
        const int64_t kept = call.taps - 1;
        const Operand& from = j < kept ? call.state : call.x;
        if (!from.data) {
            std::fill(to, to + count, 0.0f);
            return;
        }
        const int64_t row = j < kept ? j : j - kept;
        const int64_t place = request * from.stride_outer + row * from.stride_row + first * from.stride_head;
        const char* start = from.data + place * size_of(from.dtype);
        if (from.stride_head == 1) copy_row(FloatDot{}, start, from.dtype, count, reinterpret_cast<char*>(to));
        else for (int64_t c = 0; c < count; c++) to[c] = element_of(start, from.dtype, c * from.stride_head);
    }

    // Outputs of `rows` consecutive tokens whose inputs lie `stride` numbers apart, the first of them at `from`.
    template <int TAPS>
    void convolve(const char* from, int64_t dtype, int64_t stride, int64_t request, int64_t token, int64_t rows) const {
        const int64_t taps = TAPS ? TAPS : call.taps, bytes = stride * size_of(dtype);
        for (int64_t t = 0; t < rows; t++, from += bytes) {
            const int64_t place = ((request * call.tokens + token + t) * call.channels + first) * size_of(call.x.dtype);
            for (int64_t c = 0; c < count; c += LANES) {
                Floats sum = numbers_at(from, dtype, c, count) * load<Floats>(weight + c);
#pragma GCC unroll 4
                for (int64_t i = 1; i < taps; i++)
                    sum += numbers_at(from + i * bytes, dtype, c, count) * load<Floats>(weight + i * CHANNELS + c);
                sum = activated(call.activation, sum + load<Floats>(bias + c));
                put_numbers(call.result + place, call.x.dtype, c, count, sum);
            }
        }
    }

    template <int TAPS> void run(int64_t request, int64_t from, int64_t to) const {
        const Operand& x = call.x;
        const int64_t kept = call.taps - 1, direct = x.stride_head == 1 ? std::clamp(kept, from, to) : to;
        for (int64_t t = from; t < direct; t += TILE_TOKENS) {
            const int64_t rows = std::min(TILE_TOKENS, direct - t);
            for (int64_t j = 0; j < rows + kept; j++) gather(request, t + j, inputs + j * CHANNELS);
            convolve<TAPS>(reinterpret_cast<const char*>(inputs), FLOAT32, CHANNELS, request, t, rows);
        }
        const int64_t place = request * x.stride_outer + (direct - kept) * x.stride_row + first;
        if (direct < to)
            convolve<TAPS>(x.data + place * size_of(x.dtype), x.dtype, x.stride_row, request, direct, to - direct);
    }

    // The W - 1 inputs up to the last valid token.
    void keep(int64_t request) const {
        const int64_t kept = call.taps - 1;
        const int64_t valid = call.lengths ? std::clamp<int64_t>(call.lengths[request], 0, call.tokens) : call.tokens;
        for (int64_t j = 0; j < kept; j++) {
            gather(request, valid + j, inputs);
            char* to = call.new_state + ((request * kept + j) * call.channels + first) * size_of(call.state_dtype);
            for (int64_t c = 0; c < count; c += LANES)
                put_numbers(to, call.state_dtype, c, count, load<Floats>(inputs + c));
        }
    }
};

// A task is a chunk of channels and a run of tokens, which may cross from one request to the next.
int64_t run_tasks(const ConvCall& call, char* base, int64_t stride, int64_t threads) {
    const int64_t chunks = (call.channels + CHANNELS - 1) / CHANNELS, all = call.batch * call.tokens;
    const int64_t runs = (all + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK;
#pragma omp parallel num_threads(threads)
    {
        Carver carver(base + omp_get_thread_num() * stride);
        ConvTile tile(carver, call);
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
