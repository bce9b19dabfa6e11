// k31::attn_res_prepare on the CPU (K3.1 spec 2.2, first phase): all queries of a block against its frozen sums.
//
// The width is cut into pieces that stay in the first-level cache. Tokens are taken a few at a time, so that a piece
// of the queries, which are the larger operand, is fetched once for all of them.
#include <omp.h>

#include "attn_res_call.h"
#include "numbers.h"

namespace k31 {

constexpr int64_t PIECE = 512;       // numbers of a row that are worked on at a time
constexpr int BLOCKS = 4;            // rows of the bank in one register tile
constexpr int QUERIES = 2;           // queries in one register tile
constexpr int64_t QUERY_GROUP = 32;  // queries whose sums are kept at a time: bounds the scratch
constexpr int64_t TOKEN_GROUP = 4;

// sums[q][r] += query_q . row_r over one piece; the piece's own sum is formed first, which keeps its rounding small.
template <int Q, int R>
void dot_piece(const char* const* query, const float* rows, int64_t width, Floats* sums, int64_t stride) {
    Floats own[Q][R] = {};
    const auto step = [&](int64_t i, auto at) {
        Floats row[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) row[r] = load<Floats>(rows + r * PIECE + i);
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++) {
            const Floats number = at(query[q]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) own[q][r] += number * row[r];
        }
    };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) step(i, [i](const char* from) { return load<Floats>(from + i * 4); });
    if (i < width) step(i, [i, width](const char* from) { return numbers_at(from, FLOAT32, i, width); });
    for (int q = 0; q < Q; q++)
        for (int r = 0; r < R; r++) sums[q * stride + r] += own[q][r];
}

// mixed[q] (+)= sum_r weight[r][q] * row_r over one piece.
template <int Q, int R>
void mix_piece(const float* rows, const float* weights, int64_t stride, int64_t width, float* const* mixed, bool more) {
    float weight[Q][R];
    for (int q = 0; q < Q; q++)
        for (int r = 0; r < R; r++) weight[q][r] = weights[r * stride + q];
    for (int64_t i = 0; i < width; i += LANES) {
        Floats row[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) row[r] = load<Floats>(rows + r * PIECE + i);
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++) {
            char* to = reinterpret_cast<char*>(mixed[q]);
            Floats sum = more ? numbers_at(to, FLOAT32, i, width) : Floats{};
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sum += weight[q][r] * row[r];
            put_numbers(to, FLOAT32, i, width, sum);
        }
    }
}

using DotPiece = void (*)(const char* const*, const float*, int64_t, Floats*, int64_t);
using MixPiece = void (*)(const float*, const float*, int64_t, int64_t, float* const*, bool);
constexpr DotPiece DOT[QUERIES][BLOCKS] = {
    {dot_piece<1, 1>, dot_piece<1, 2>, dot_piece<1, 3>, dot_piece<1, 4>},
    {dot_piece<2, 1>, dot_piece<2, 2>, dot_piece<2, 3>, dot_piece<2, 4>}};
constexpr MixPiece MIX[QUERIES][BLOCKS] = {
    {mix_piece<1, 1>, mix_piece<1, 2>, mix_piece<1, 3>, mix_piece<1, 4>},
    {mix_piece<2, 1>, mix_piece<2, 2>, mix_piece<2, 3>, mix_piece<2, 4>}};

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
    SumOfSquares* squares;           // [TOKEN_GROUP][count]
    float* weights;                  // [count][QUERY_GROUP]: logits, then weights

    BankTile(Carver& from, const PrepareCall& c, const int64_t* valid, int64_t valid_count)
        : call(c), blocks(valid), count(valid_count), rows(from.take<float>(BLOCKS * PIECE)),
          sums(from.take<Floats>(TOKEN_GROUP * QUERY_GROUP * valid_count)),
          squares(from.take<SumOfSquares>(TOKEN_GROUP * valid_count)),
          weights(from.take<float>(QUERY_GROUP * valid_count)) {}

    // One piece of up to BLOCKS rows of a token, as floats and with zeros up to the next whole vector.
    int gather(int64_t token, int64_t block, int64_t start, int64_t width) const {
        const Operand& bank = call.bank;
        const int n = int(std::min<int64_t>(BLOCKS, count - block));
        for (int r = 0; r < n; r++) {
            const int64_t place = token * bank.stride_row + blocks[block + r] * bank.stride_head + start;
            const char* from = bank.data + place * size_of(bank.dtype);
            for (int64_t i = 0; i < width; i += LANES)
                store(rows + r * PIECE + i, numbers_at(from, bank.dtype, i, width));
        }
        return n;
    }

    void accumulate(int64_t token, int64_t slot, int64_t start, int64_t width) const {
        for (int64_t b = 0; b < count; b += BLOCKS) {
            const int n = gather(token, b, start, width);
            for (int r = 0; r < n; r++)
                for (int64_t i = 0; i < width; i += LANES)
                    squares[slot * count + b + r].add(load<Floats>(rows + r * PIECE + i));
            for (int64_t q = 0; q < queries; q += QUERIES) {
                const char* query[QUERIES];
                for (int k = 0; k < QUERIES; k++)
                    query[k] = call.queries.data + ((first + q + k) * call.queries.stride_head + start) * 4;
                const int wide = int(std::min<int64_t>(QUERIES, queries - q));
                DOT[wide - 1][n - 1](query, rows, width, sums + (slot * QUERY_GROUP + q) * count + b, count);
            }
        }
    }

    // Logits, their maximum, and the weights relative to it.
    void weigh(int64_t token, int64_t slot) const {
        for (int64_t b = 0; b < count; b++) {
            const float factor = inverse_rms(squares[slot * count + b].total(), call.width, float(call.eps));
            for (int64_t q = 0; q < QUERY_GROUP; q++)
                weights[b * QUERY_GROUP + q] =
                    q < queries ? sum_lanes(sums[(slot * QUERY_GROUP + q) * count + b]) * factor : 0.0f;
        }
        const int64_t place = token * call.queries_count + first;
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

    void mix(int64_t token) const {
        for (int64_t start = 0; start < call.width; start += PIECE) {
            const int64_t width = std::min(PIECE, call.width - start);
            for (int64_t b = 0; b < count; b += BLOCKS) {
                const int n = gather(token, b, start, width);
                for (int64_t q = 0; q < queries; q += QUERIES) {
                    float* mixed[QUERIES];
                    for (int k = 0; k < QUERIES; k++)
                        mixed[k] = call.mixture + (token * call.queries_count + first + q + k) * call.width + start;
                    const int wide = int(std::min<int64_t>(QUERIES, queries - q));
                    MIX[wide - 1][n - 1](rows, weights + b * QUERY_GROUP + q, QUERY_GROUP, width, mixed, b > 0);
                }
            }
        }
    }

    // Tokens [from, to), at most TOKEN_GROUP of them.
    void run(int64_t from, int64_t to) {
        for (first = 0; first < call.queries_count; first += QUERY_GROUP) {
            queries = std::min(QUERY_GROUP, call.queries_count - first);
            std::fill(sums, sums + TOKEN_GROUP * QUERY_GROUP * count, Floats{});
            std::fill(squares, squares + TOKEN_GROUP * count, SumOfSquares{});
            for (int64_t start = 0; start < call.width; start += PIECE)
                for (int64_t token = from; token < to; token++)
                    accumulate(token, token - from, start, std::min(PIECE, call.width - start));
            for (int64_t token = from; token < to; token++) {
                weigh(token, token - from);
                mix(token);
            }
        }
    }
};

int64_t prepare(const PrepareCall& call) {
    const double work = double(call.tokens) * double(call.blocks) * double(call.queries_count) * double(call.width);
    const int64_t threads = threads_for(2 * work, call.threads);
    Carver measure_list(nullptr), measure(nullptr);
    measure_list.take<int64_t>(call.blocks);
    BankTile(measure, call, nullptr, call.blocks);
    const Scratch scratch(measure_list.used() + measure.used() * threads);
    if (!scratch) return NO_MEMORY;
    int64_t* valid = reinterpret_cast<int64_t*>(scratch.base());
    int64_t count = 0;
    for (int64_t b = 0; b < call.blocks; b++)
        if (!call.valid || call.valid[b]) valid[count++] = b;
    if (!count) std::fill(call.mixture, call.mixture + call.tokens * call.queries_count * call.width, 0.0f);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t token = 0; token < call.tokens; token += TOKEN_GROUP) {
        Carver carver(scratch.base() + measure_list.used() + omp_get_thread_num() * measure.used());
        BankTile(carver, call, valid, count).run(token, std::min(token + TOKEN_GROUP, call.tokens));
    }
    return OK;
}

}  // namespace k31

K31_EXPORT int64_t k31_attn_res_prepare_size() { return sizeof(k31::PrepareCall); }

K31_EXPORT int64_t k31_attn_res_prepare(k31::PrepareCall* call) { return k31::prepare(*call); }
