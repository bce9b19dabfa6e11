// k31::attn_res_prepare on the CPU (K3.1 spec 2.2, first phase): all queries of a block against its frozen sums.
//
// The width is cut into pieces that stay in the first-level cache. Tokens are taken a few at a time, so that a piece
// of the queries, which are the larger operand, is fetched once for all of them.
#include <omp.h>

#include <array>
#include <utility>

#include "attn_res_call.h"
#include "numbers.h"

namespace k31 {
namespace {

constexpr int64_t PIECE = 512;               // numbers of a row that are worked on at a time
constexpr int BLOCKS = LANES == 16 ? 8 : 4;  // frozen sums in one register tile: as many as fit beside the rest
constexpr int QUERIES = 3;                   // queries in one register tile
constexpr int64_t QUERY_GROUP = 32;          // queries whose sums are kept at a time: bounds the scratch
constexpr int64_t TOKEN_GROUP = 4;
constexpr int ABREAST = 4;  // independent sums: one alone would wait for its own last addition

// sums[q][r] += query_q . row_r over one piece; the piece's own sum is formed first, which keeps its rounding small.
template <int Q, int R>
void dot_piece(const char* const* query, int64_t dtype, const float* rows, int64_t width, Floats* sums,
               int64_t stride) {
    Floats own[Q][R];
#pragma GCC unroll 3
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) own[q][r] = Floats{};
    const auto step = [&](int64_t i, auto at) K31_BODY {
        Floats number[Q];
#pragma GCC unroll 3
        for (int q = 0; q < Q; q++) number[q] = at(query[q]);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Floats row = load<Floats>(rows + r * PIECE + i);
            K31_KEEP(row);
#pragma GCC unroll 3
            for (int q = 0; q < Q; q++) own[q][r] += number[q] * row;
        }
    };
    const int64_t whole = width / LANES * LANES;
    if (dtype == FLOAT32)
        for (int64_t i = 0; i < whole; i += LANES) step(i, [i](const char* x) { return load<Floats>(x + i * 4); });
    else
        for (int64_t i = 0; i < whole; i += LANES) step(i, [i](const char* x) { return widen(load<Halves>(x + i * 2)); });
    if (whole < width) step(whole, [=](const char* x) { return numbers_at(x, dtype, whole, width); });
#pragma GCC unroll 3
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[q * stride + r] += own[q][r];
}

// mixed[q] (+)= sum_r weight[r][q] * row_r over one piece.
template <int Q, int R>
void mix_piece(const float* rows, const float* weights, int64_t stride, int64_t width, float* const* mixed, bool more) {
    float weight[Q][R];
    for (int q = 0; q < Q; q++)
        for (int r = 0; r < R; r++) weight[q][r] = weights[r * stride + q];
    for (int64_t i = 0; i < width; i += LANES) {
        Floats sum[Q];
#pragma GCC unroll 3
        for (int q = 0; q < Q; q++)
            sum[q] = more ? numbers_at(reinterpret_cast<char*>(mixed[q]), FLOAT32, i, width) : Floats{};
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Floats row = load<Floats>(rows + r * PIECE + i);
            K31_KEEP(row);
#pragma GCC unroll 3
            for (int q = 0; q < Q; q++) sum[q] += weight[q][r] * row;
        }
#pragma GCC unroll 3
        for (int q = 0; q < Q; q++) put_numbers(reinterpret_cast<char*>(mixed[q]), FLOAT32, i, width, sum[q]);
    }
}

// The forms for 1 to BLOCKS rows.
template <int Q, int... R> constexpr auto dots_of(std::integer_sequence<int, R...>) {
    return std::array{dot_piece<Q, R + 1>...};
}
template <int Q, int... R> constexpr auto mixes_of(std::integer_sequence<int, R...>) {
    return std::array{mix_piece<Q, R + 1>...};
}
constexpr auto ROWS = std::make_integer_sequence<int, BLOCKS>();
constexpr std::array<decltype(dots_of<1>(ROWS)), QUERIES> DOT = {dots_of<1>(ROWS), dots_of<2>(ROWS), dots_of<3>(ROWS)};
constexpr std::array<decltype(mixes_of<1>(ROWS)), QUERIES> MIX = {mixes_of<1>(ROWS), mixes_of<2>(ROWS),
                                                                  mixes_of<3>(ROWS)};

// The larger one; a NaN on either side stays.
K31_INLINE Floats larger_or_nan(Floats a, Floats b) { return (b > a) | (b != b) ? b : a; }

// What one thread works with.
struct BankTile {
    const PrepareCall& call;
    const int64_t* blocks;  // those that are valid
    int64_t count;
    int64_t first = 0, queries = 0;  // the query group
    float* rows;                     // [BLOCKS][PIECE]
    Floats* sums;                    // [TOKEN_GROUP][QUERY_GROUP][count]
    Floats* squares;                 // [TOKEN_GROUP][count]
    float* weights;                  // [count][QUERY_GROUP]: logits, then weights

    BankTile(Carver& from, const PrepareCall& c, const int64_t* valid, int64_t valid_count)
        : call(c), blocks(valid), count(valid_count), rows(from.take<float>(BLOCKS * PIECE)),
          sums(from.take<Floats>(TOKEN_GROUP * QUERY_GROUP * valid_count)),
          squares(from.take<Floats>(TOKEN_GROUP * valid_count)), weights(from.take<float>(QUERY_GROUP * valid_count)) {}

    // A piece of a token's rows.
    struct Place {
        int64_t token, start;
    };

    // Numbers of one row as floats, with zeros up to the next whole vector; gives the lanes' sums of their squares.
    template <int64_t DTYPE> static Floats widen_row(const char* from, int64_t width, float* to) {
        Floats own[ABREAST] = {};
        int64_t i = 0;
        for (; i + ABREAST * LANES <= width; i += ABREAST * LANES)
#pragma GCC unroll 4
            for (int k = 0; k < ABREAST; k++) {
                const int64_t at = i + k * LANES;
                const Floats x = numbers_at(from, DTYPE, at, at + LANES);
                store(to + at, x);
                own[k] += x * x;
            }
        for (; i < width; i += LANES) {
            const Floats x = numbers_at(from, DTYPE, i, width);
            store(to + i, x);
            own[0] += x * x;
        }
        return (own[0] + own[1]) + (own[2] + own[3]);
    }

    // A piece of up to BLOCKS rows as floats; their squares are added if there is a place for them. What will be read
    // `after` it is fetched meanwhile: it begins on other pages, where the processor does not see it coming.
    int gather(Place at, int64_t block, int64_t width, Floats* squared, const Place* after = nullptr) const {
        const int n = int(std::min<int64_t>(BLOCKS, count - block));
        for (int r = 0; r < n; r++) {
            const Operand& sum = call.blocks[blocks[block + r]];
            const int64_t size = size_of(sum.dtype);
            if (after) prefetch_far(row_of(sum, after->token) + after->start * size, width * size);
            const char* const from = row_of(sum, at.token) + at.start * size;
            float* const to = rows + r * PIECE;
            const Floats own = sum.dtype == FLOAT32 ? widen_row<FLOAT32>(from, width, to)
                                                    : widen_row<BFLOAT16>(from, width, to);
            if (squared) squared[block + r] += own;
        }
        return n;
    }

    void accumulate(Place at, int64_t slot, Place after) const {
        const int64_t width = std::min(PIECE, call.width - at.start);
        const Operand& from = call.queries;
        for (int64_t b = 0; b < count; b += BLOCKS) {
            const int n = gather(at, b, width, squares + slot * count, &after);
            for (int64_t q = 0; q < queries; q += QUERIES) {
                const char* query[QUERIES];
                for (int k = 0; k < QUERIES; k++)
                    query[k] = from.data + ((first + q + k) * from.stride_head + at.start) * size_of(from.dtype);
                const int wide = int(std::min<int64_t>(QUERIES, queries - q));
                DOT[size_t(wide - 1)][size_t(n - 1)](query, from.dtype, rows, width,
                                                     sums + (slot * QUERY_GROUP + q) * count + b, count);
            }
        }
    }

    // Logits, their maximum, and the weights relative to it.
    void weigh(int64_t token, int64_t slot) const {
        for (int64_t b = 0; b < count; b++) {
            const float factor = inverse_rms(sum_lanes(squares[slot * count + b]), call.width, float(call.eps));
            for (int64_t q = 0; q < QUERY_GROUP; q++)
                weights[b * QUERY_GROUP + q] =
                    q < queries ? sum_lanes(sums[(slot * QUERY_GROUP + q) * count + b]) * factor : 0.0f;
        }
        const int64_t place = token * call.query_count + first;
        for (int64_t q = 0; q < queries; q += LANES) {
            Floats top = splat(-__builtin_inff()), total{};
            for (int64_t b = 0; b < count; b++)
                top = larger_or_nan(top, load<Floats>(weights + b * QUERY_GROUP + q));
            const Floats base = top == -__builtin_inff() ? Floats{} : top;
            for (int64_t b = 0; b < count; b++) {
                float* weight = weights + b * QUERY_GROUP + q;
                store(weight, exp_negative(load<Floats>(weight) - base));
                total += load<Floats>(weight);
            }
            put_numbers(reinterpret_cast<char*>(call.maximum + place), FLOAT32, q, queries, top);
            put_numbers(reinterpret_cast<char*>(call.total + place), FLOAT32, q, queries, total);
        }
    }

    void give_weights(int64_t token) const {
        for (int64_t q = 0; q < queries; q++) {
            float* to = call.weights + (token * call.query_count + first + q) * call.block_count;
            std::fill(to, to + call.block_count, 0.0f);
            for (int64_t b = 0; b < count; b++) to[blocks[b]] = weights[b * QUERY_GROUP + q];
        }
    }

    void mix(int64_t token) const {
        for (int64_t start = 0; start < call.width; start += PIECE) {
            const int64_t width = std::min(PIECE, call.width - start);
            for (int64_t b = 0; b < count; b += BLOCKS) {
                const int n = gather({token, start}, b, width, nullptr);
                for (int64_t q = 0; q < queries; q += QUERIES) {
                    float* mixed[QUERIES];
                    for (int k = 0; k < QUERIES; k++)
                        mixed[k] = call.mixture + (token * call.query_count + first + q + k) * call.width + start;
                    const int wide = int(std::min<int64_t>(QUERIES, queries - q));
                    MIX[size_t(wide - 1)][size_t(n - 1)](rows, weights + b * QUERY_GROUP + q, QUERY_GROUP, width,
                                                         mixed, b > 0);
                }
            }
        }
    }

    // Where the sums are read next; the last piece of all stands for what comes after it.
    Place place_after(Place at, int64_t from, int64_t to) const {
        if (at.token + 1 < to) return {at.token + 1, at.start};
        if (at.start + PIECE < call.width) return {from, at.start + PIECE};
        return to < call.tokens ? Place{to, 0} : at;
    }

    // Tokens [from, to), at most TOKEN_GROUP of them.
    void run(int64_t from, int64_t to) {
        for (first = 0; first < call.query_count; first += QUERY_GROUP) {
            queries = std::min(QUERY_GROUP, call.query_count - first);
            std::fill(squares, squares + (to - from) * count, Floats{});
            for (int64_t slot = 0; slot < to - from; slot++) {
                Floats* const own = sums + slot * QUERY_GROUP * count;
                std::fill(own, own + queries * count, Floats{});
            }
            for (int64_t start = 0; start < call.width; start += PIECE)
                for (int64_t token = from; token < to; token++)
                    accumulate({token, start}, token - from, place_after({token, start}, from, to));
            for (int64_t token = from; token < to; token++) {
                weigh(token, token - from);
                if (call.weights) give_weights(token);
                else mix(token);
            }
        }
    }
};

int64_t prepare(const PrepareCall& call) {
    const double work = double(call.tokens) * double(call.block_count) * double(call.query_count) * double(call.width);
    const int64_t threads = threads_for(2 * work, call.threads);
    Carver measure_list(nullptr), measure(nullptr);
    measure_list.take<int64_t>(call.block_count);
    BankTile(measure, call, nullptr, call.block_count);
    const Scratch scratch(measure_list.used() + measure.used() * threads);
    if (!scratch) return NO_MEMORY;
    int64_t* valid = reinterpret_cast<int64_t*>(scratch.base());
    int64_t count = 0;
    for (int64_t b = 0; b < call.block_count; b++)
        if (!call.valid || call.valid[b]) valid[count++] = b;
    if (!count && call.mixture)
        std::fill(call.mixture, call.mixture + call.tokens * call.query_count * call.width, 0.0f);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t token = 0; token < call.tokens; token += TOKEN_GROUP) {
        Carver carver(scratch.base() + measure_list.used() + omp_get_thread_num() * measure.used());
        BankTile(carver, call, valid, count).run(token, std::min(token + TOKEN_GROUP, call.tokens));
    }
    return OK;
}

}  // namespace
}  // namespace k31

K31_EXPORT int64_t k31_attn_res_prepare_size() { return sizeof(k31::PrepareCall); }

K31_EXPORT int64_t k31_attn_res_prepare(k31::PrepareCall* call) { return k31::prepare(*call); }
