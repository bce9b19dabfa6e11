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

constexpr int64_t TILE = 4096;            // numbers, beside the W - 1 rows before them
constexpr int64_t CHANNELS = 256;         // of one task, where they lie side by side
constexpr int64_t CHANNELS_STRIDED = 64;  // where they do not: fewer, so that more tokens of each are read at once
constexpr int64_t TOKENS_PER_TASK = 256;  // packing a task's weights must be little beside using them
constexpr int64_t COMMON_TAPS = 4;

// What one thread works with, for the channels [first, first + count).
struct ConvTile {
    const ConvCall& call;
    const int64_t channels;         // of a whole chunk
    float *weight, *bias, *inputs;  // [W][channels], [channels], [W - 1 + TILE / channels][channels]
    int64_t first = 0, count = 0;

    ConvTile(Carver& from, const ConvCall& c)
        : call(c), channels(c.x.stride_head == 1 ? CHANNELS : CHANNELS_STRIDED),
          weight(from.take<float>(c.taps * channels)), bias(from.take<float>(channels)),
          inputs(from.take<float>((c.taps - 1) * channels + TILE)) {}

    int64_t chunks() const { return (call.channels + channels - 1) / channels; }

    void choose(int64_t chunk) {
        first = chunk * channels;
        count = std::min(channels, call.channels - first);
    }

    void pack() {
        const Operand &w = call.weight, &b = call.bias;
        for (int64_t c = 0; c < count; c++) {
            const char* taps = w.data + (first + c) * w.stride_row * size_of(w.dtype);
            for (int64_t i = 0; i < call.taps; i++)
                weight[i * channels + c] = element_of(taps, w.dtype, i * w.stride_head);
            bias[c] = b.data ? element_of(b.data, b.dtype, (first + c) * b.stride_head) : 0.0f;
        }
    }

    // Rows [j, j + rows) of the window, the state's rows first, as floats.
    void gather(int64_t request, int64_t j, int64_t rows) const {
        const int64_t kept = call.taps - 1, old = std::clamp<int64_t>(kept - j, 0, rows);
        gather_from(call.state, request, j, old, inputs);
        gather_from(call.x, request, j + old - kept, rows - old, inputs + old * channels);
    }

    void gather_from(const Operand& from, int64_t request, int64_t row, int64_t rows, float* to) const {
        const int64_t place = request * from.stride_outer + row * from.stride_row + first * from.stride_head;
        const char* start = from.data + place * size_of(from.dtype);
        if (!from.data || from.stride_head == 1) {
            for (int64_t r = 0; r < rows; r++, to += channels) {
                const char* source = start + r * from.stride_row * size_of(from.dtype);
                if (from.data) copy_row(FloatDot{}, source, from.dtype, count, reinterpret_cast<char*>(to));
                else std::fill(to, to + count, 0.0f);
            }
        } else if (from.dtype == FLOAT32) {
            transpose<float>(start, from, rows, to);
        } else {
            transpose<uint16_t>(start, from, rows, to);
        }
    }

    // Channel by channel, since time is what lies side by side.
    template <class T> void transpose(const char* start, const Operand& from, int64_t rows, float* to) const {
        for (int64_t c = 0; c < count; c++, start += from.stride_head * int64_t(sizeof(T)))
            for (int64_t r = 0; r < rows; r++) {
                const T number = read<T>(start + r * from.stride_row * int64_t(sizeof(T)));
                if constexpr (sizeof(T) == 4) to[r * channels + c] = number;
                else to[r * channels + c] = widen(number);
            }
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
                    sum += numbers_at(from + i * bytes, dtype, c, count) * load<Floats>(weight + i * channels + c);
                sum = activated(call.activation, sum + load<Floats>(bias + c));
                put_numbers(call.result + place, call.x.dtype, c, count, sum);
            }
        }
    }

    template <int TAPS> void run(int64_t request, int64_t from, int64_t to) const {
        const Operand& x = call.x;
        const int64_t kept = call.taps - 1, direct = x.stride_head == 1 ? std::clamp(kept, from, to) : to;
        for (int64_t t = from; t < direct; t += TILE / channels) {
            const int64_t rows = std::min(TILE / channels, direct - t);
            gather(request, t, rows + kept);
            convolve<TAPS>(reinterpret_cast<const char*>(inputs), FLOAT32, channels, request, t, rows);
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
            gather(request, valid + j, 1);
            char* to = call.new_state + ((request * kept + j) * call.channels + first) * size_of(call.state_dtype);
            for (int64_t c = 0; c < count; c += LANES)
                put_numbers(to, call.state_dtype, c, count, load<Floats>(inputs + c));
        }
    }
};

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
