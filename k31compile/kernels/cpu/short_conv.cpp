// k31::short_conv on the CPU (K3.1 spec 2.6): channels lie across the lanes, taps are added in order.
//
// Rows of channels are read where they lie. What has no such rows (a tensor whose time runs fastest, the inputs in
// the state) goes through a small tile of floats that never leaves the first-level cache.
#include <omp.h>

#include "activation.h"
#include "numbers.h"
#include "short_conv.h"

namespace k31 {

constexpr int64_t TILE = 4096;            // numbers, beside the W - 1 rows before them
constexpr int64_t CHANNELS = 256;         // of one task, where they lie side by side
constexpr int64_t CHANNELS_STRIDED = 64;  // where they do not: fewer, so that more tokens of each are read at once
constexpr int64_t TOKENS_PER_TASK = 256;  // packing a task's weights must be little beside using them
constexpr int64_t COMMON_TAPS = 4;

typedef float Four __attribute__((vector_size(16)));
typedef uint32_t FourWords __attribute__((vector_size(16)));
typedef uint16_t FourHalves __attribute__((vector_size(8)));

template <class T> K31_INLINE float number_at(const char* from) {
    if constexpr (sizeof(T) == 4) return read<T>(from);
    else return widen(read<T>(from));
}

template <class T> K31_INLINE Four four_at(const char* from) {
    if constexpr (sizeof(T) == 4) return load<Four>(from);
    else return bits<Four>(__builtin_convertvector(load<FourHalves>(from), FourWords) << 16);
}

// Four rows of four become four columns, `stride` numbers apart.
K31_INLINE void put_transposed(const Four (&rows)[4], float* to, int64_t stride) {
    const FourWords low{0, 4, 1, 5}, high{2, 6, 3, 7}, first{0, 1, 4, 5}, second{2, 3, 6, 7};
    const Four a = __builtin_shuffle(rows[0], rows[1], low), b = __builtin_shuffle(rows[2], rows[3], low);
    const Four c = __builtin_shuffle(rows[0], rows[1], high), d = __builtin_shuffle(rows[2], rows[3], high);
    store(to, __builtin_shuffle(a, b, first));
    store(to + stride, __builtin_shuffle(a, b, second));
    store(to + 2 * stride, __builtin_shuffle(c, d, first));
    store(to + 3 * stride, __builtin_shuffle(c, d, second));
}

// to[r][c] = from[c * channel + r * row] for `count` channels and `rows` rows of `stride` numbers.
template <class T>
void transpose(const char* from, int64_t channel, int64_t row, int64_t count, int64_t rows, float* to, int64_t stride) {
    constexpr int64_t SIZE = sizeof(T);
    const int64_t whole_rows = row == 1 ? rows / 4 * 4 : 0, whole = whole_rows ? count / 4 * 4 : 0;
    for (int64_t c = 0; c < whole; c += 4)
        for (int64_t r = 0; r < whole_rows; r += 4) {
            Four block[4];
#pragma GCC unroll 4
            for (int64_t k = 0; k < 4; k++) block[k] = four_at<T>(from + ((c + k) * channel + r) * SIZE);
            put_transposed(block, to + r * stride + c, stride);
        }
    for (int64_t c = 0; c < count; c++)
        for (int64_t r = c < whole ? whole_rows : 0; r < rows; r++)
            to[r * stride + c] = number_at<T>(from + (c * channel + r * row) * SIZE);
}

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
        gather_strided(w, first * w.stride_row, w.stride_row, w.stride_head, call.taps, weight);
        if (b.data) gather_strided(b, first * b.stride_head, b.stride_head, 0, 1, bias);
        else std::fill(bias, bias + count, 0.0f);
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
        } else {
            gather_strided(from, place, from.stride_head, from.stride_row, rows, to);
        }
    }

    void gather_strided(const Operand& from, int64_t place, int64_t channel, int64_t row, int64_t rows,
                        float* to) const {
        const auto gathered = from.dtype == FLOAT32 ? transpose<float> : transpose<uint16_t>;
        gathered(from.data + place * size_of(from.dtype), channel, row, count, rows, to, channels);
    }

    // Outputs of `rows` consecutive tokens whose inputs lie `stride` numbers apart, the first of them at `from`.
    template <int TAPS, int64_t DTYPE>
    void convolve(const char* from, int64_t stride, int64_t request, int64_t token, int64_t rows) const {
        const int64_t taps = TAPS ? TAPS : call.taps, bytes = stride * size_of(DTYPE);
        for (int64_t t = 0; t < rows; t++, from += bytes) {
            const int64_t place = ((request * call.tokens + token + t) * call.channels + first) * size_of(call.x.dtype);
            for (int64_t c = 0; c < count; c += LANES) {
                Floats sum = numbers_at(from, DTYPE, c, count) * load<Floats>(weight + c);
#pragma GCC unroll 4
                for (int64_t i = 1; i < taps; i++)
                    sum += numbers_at(from + i * bytes, DTYPE, c, count) * load<Floats>(weight + i * channels + c);
                sum = activated(call.activation, sum + load<Floats>(bias + c));
                put_numbers(call.result + place, call.x.dtype, c, count, sum);
            }
        }
    }

    void run(int64_t request, int64_t from, int64_t to) const {
        if (call.taps == COMMON_TAPS) run_taps<COMMON_TAPS>(request, from, to);
        else run_taps<0>(request, from, to);
    }

    template <int TAPS> void run_taps(int64_t request, int64_t from, int64_t to) const {
        const Operand& x = call.x;
        const int64_t kept = call.taps - 1, direct = x.stride_head == 1 ? std::clamp(kept, from, to) : to;
        for (int64_t t = from; t < direct; t += TILE / channels) {
            const int64_t rows = std::min(TILE / channels, direct - t);
            gather(request, t, rows + kept);
            convolve<TAPS, FLOAT32>(reinterpret_cast<const char*>(inputs), channels, request, t, rows);
        }
        if (direct == to) return;
        const int64_t place = request * x.stride_outer + (direct - kept) * x.stride_row + first;
        const char* start = x.data + place * size_of(x.dtype);
        if (x.dtype == FLOAT32) convolve<TAPS, FLOAT32>(start, x.stride_row, request, direct, to - direct);
        else convolve<TAPS, BFLOAT16>(start, x.stride_row, request, direct, to - direct);
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
                tile.run(request, from, to);
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

int64_t scratch_of_one_request(const ConvCall& call) {
    Carver measure(nullptr);
    ConvTile(measure, call);
    return measure.used();
}

void convolve_one_request(const ConvCall& call, char* scratch) {
    Carver carver(scratch);
    ConvTile tile(carver, call);
    for (int64_t chunk = 0; chunk < tile.chunks(); chunk++) {
        tile.choose(chunk);
        tile.pack();
        tile.run(0, 0, call.tokens);
        tile.keep(0);
    }
}

}  // namespace k31

K31_EXPORT int64_t k31_short_conv_size() { return sizeof(k31::ConvCall); }

K31_EXPORT int64_t k31_short_conv(k31::ConvCall* call) {
    constexpr double ACTIVATION = 12;  // operations
    const double numbers = double(call->batch) * double(call->tokens) * double(call->channels);
    const int64_t threads = k31::threads_for(numbers * (double(call->taps) + ACTIVATION), call->threads);
    const int64_t bytes = k31::scratch_of_one_request(*call);
    const k31::Scratch scratch(bytes * threads);
    if (!scratch) return k31::NO_MEMORY;
    return k31::run_tasks(*call, scratch.base(), bytes, threads);
}
