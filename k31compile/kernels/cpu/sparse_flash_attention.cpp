// k31::sparse_flash_attention on the CPU (K3.1 spec 2.9): gather the named rows block by block, attend, forget them.
//
// The list of a row is cut into chunks of fixed length; each gives a partial result and they are merged in order.
// The cut does not depend on the number of threads, so neither does the result.
#include <omp.h>

#include "attention_block.h"

namespace k31 {

constexpr int64_t CHUNK = 22 * ROW_BLOCK;
constexpr double WORTH_A_THREAD = 2e6;  // multiplications below which waking a thread costs more than it saves

// One query row and the heads of one key head.
struct Item {
    int64_t request, row, group;

    Item(const AttentionCall& call, int64_t number)
        : request(number / call.groups / call.lengths.rows), row(number / call.groups % call.lengths.rows),
          group(number % call.groups) {}
};

inline int64_t count_items(const AttentionCall& call) { return call.lengths.batch * call.lengths.rows * call.groups; }

// What an item needs before its chunks can start: the packed query and the positions that it really attends to.
template <class Dot> struct Prepared {
    typename Dot::Element* query;
    int64_t* positions;
    float* biases;  // of a float mask; null without one
    int64_t used;

    static Prepared carve(Carver& from, const AttentionCall& call, const Shape<Dot>& s) {
        return {from.take<typename Dot::Element>(s.head_lanes * s.depth), from.take<int64_t>(call.count),
                call.mask.row(0, 0).is_float() ? from.take<float>(call.count) : nullptr, 0};
    }

    Status collect(AttentionCall& call, const Item& item) {
        const int64_t visible = call.lengths.visible(item.request, item.row);
        const RequestCache cache{call.paging, item.request};
        const MaskRow mask = call.mask.row(item.request, item.row);
        const char* list = call.indices + (item.request * call.index_stride_request + item.row * call.index_stride_row) *
                                              call.index_bytes;
        used = 0;
        for (int64_t j = 0; j < call.count; j++) {
            const int64_t position = call.index_bytes == 8 ? read<int64_t>(list + j * 8) : read<int32_t>(list + j * 4);
            if (position < 0) continue;
            if (position >= call.lengths.limit) return fail(call, BAD_INDEX, position);
            if (position >= visible || mask.hides(position)) continue;
            if (!cache.exists(position)) return fail(call, BAD_BLOCK, item.request);
            if (biases) biases[used] = mask.bias(position);
            positions[used++] = position;
        }
        return OK;
    }

    void pack(const AttentionCall& call, const Shape<Dot>& s, const Item& item) {
        const int64_t vectors = s.head_lanes / LANES;
        for (int64_t v = 0; v < vectors; v += panel_width(vectors - v)) {
            const int width = panel_width(vectors - v);
            auto* panel = query + v * LANES * s.depth;
            pack_part(call.query, s, item, v, width, call.width, panel);
            if (call.rope_width)
                pack_part(call.query_rope, s, item, v, width, call.rope_width, panel + s.key_depth * width * LANES);
        }
    }

  private:
    static Status fail(AttentionCall& call, Status status, int64_t detail) {
#pragma omp critical(k31_attention_failure)
        call.failed = detail;
        return status;
    }
    static void pack_part(const Operand& q, const Shape<Dot>& s, const Item& item, int64_t v, int vecs, int64_t width,
                          typename Dot::Element* panel) {
        const int64_t offset =
            item.request * q.stride_outer + item.row * q.stride_row + item.group * s.heads * q.stride_head;
        pack_panel<Dot>(q.data + offset * size_of(q.dtype), q.dtype, q.stride_head, s.heads, v * LANES, vecs, width,
                        panel);
    }
};

template <class Dot>
void attend_chunk(const AttentionCall& call, const Shape<Dot>& s, const Item& item, const Prepared<Dot>& prepared,
                  int64_t from, Block<Dot>& block, Partial& state) {
    const int64_t to = std::min(from + CHUNK, prepared.used);
    state.clear(s);
    for (int64_t j = from; j < to; j += KEYS) {
        const int64_t n = std::min(KEYS, to - j);
        const RequestCache cache{call.paging, item.request};
        // The list goes on behind this chunk: where one thread does them all, it is the next one's beginning.
        Expected expected{call, cache, item.group, prepared.positions + j + n, std::min(KEYS, prepared.used - j - n)};
        block.gather(call, s, cache, item.group, prepared.positions + j, n);
        block.score(s, prepared.query, n, float(call.scale), prepared.biases ? prepared.biases + j : nullptr, expected);
        block.weigh(s, n, state);
        block.mix(s, n, state, expected);
    }
}

// Two partial results over different keys become one.
template <class Dot> void merge(const Shape<Dot>& s, const Partial& other, Partial& into) {
    for (int64_t h = 0; h < s.head_lanes; h += LANES) {
        const Floats a = load<Floats>(into.top + h), b = load<Floats>(other.top + h), top = larger(a, b);
        const Floats keep = exp_negative(a - subtractable(top)), take = exp_negative(b - subtractable(top));
        store(into.top + h, top);
        store(into.total + h, load<Floats>(into.total + h) * keep + load<Floats>(other.total + h) * take);
        float kept[LANES], taken[LANES];
        store(kept, keep);
        store(taken, take);
        for (int i = 0; i < LANES; i++) {
            float* out = into.output + (h + i) * s.value_lanes;
            const float* in = other.output + (h + i) * s.value_lanes;
            for (int64_t d = 0; d < s.value_lanes; d++) out[d] = out[d] * kept[i] + in[d] * taken[i];
        }
    }
}

// Normalise into the result; a row without keys has total 0 and output 0.
template <class Dot>
void finish(const AttentionCall& call, const Shape<Dot>& s, const Item& item, const Partial& state) {
    const int64_t row = (item.request * call.lengths.rows + item.row) * call.heads + item.group * s.heads;
    for (int64_t h = 0; h < s.heads; h++) {
        const float factor = state.total[h] == 0.0f ? 0.0f : 1.0f / state.total[h];
        const float* from = state.output + h * s.value_lanes;
        char* to = call.result + (row + h) * call.value_width * size_of(call.result_dtype);
        if (call.result_dtype == FLOAT32)
            for (int64_t d = 0; d < call.value_width; d++) store(to + d * 4, from[d] * factor);
        else
            for (int64_t d = 0; d < call.value_width; d++) store(to + d * 2, narrow(from[d] * factor));
    }
}

template <class Dot> struct Worker {
    Prepared<Dot> prepared;
    Block<Dot> block;
    Partial part, whole;

    static Worker carve(Carver& from, const AttentionCall& call, const Shape<Dot>& s) {
        Prepared<Dot> prepared = Prepared<Dot>::carve(from, call, s);
        Block<Dot> block = Block<Dot>::carve(from, s);
        Partial part = Partial::carve(from, s);
        return {prepared, block, part, Partial::carve(from, s)};
    }
};

// Many items: each thread takes whole ones.
template <class Dot> int64_t over_items(AttentionCall& call, const Shape<Dot>& s, int64_t threads) {
    Carver measure(nullptr);
    Worker<Dot>::carve(measure, call, s);
    const Scratch scratch(measure.used() * threads);
    if (!scratch) return NO_MEMORY;
    int64_t failure = OK;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(max : failure)
    for (int64_t number = 0; number < count_items(call); number++) {
        Carver carver(scratch.base() + omp_get_thread_num() * measure.used());
        Worker<Dot> worker = Worker<Dot>::carve(carver, call, s);
        const Item item(call, number);
        failure = std::max<int64_t>(failure, worker.prepared.collect(call, item));
        if (failure) continue;
        worker.prepared.pack(call, s, item);
        worker.whole.clear(s);
        for (int64_t j = 0; j < worker.prepared.used; j += CHUNK) {
            attend_chunk(call, s, item, worker.prepared, j, worker.block, j ? worker.part : worker.whole);
            if (j) merge(s, worker.part, worker.whole);
        }
        finish(call, s, item, worker.whole);
    }
    return failure;
}

// Few items (decode): the threads share the chunks of one item after the other.
template <class Dot> int64_t over_chunks(AttentionCall& call, const Shape<Dot>& s, int64_t threads) {
    const int64_t chunks = std::max<int64_t>(1, (call.count + CHUNK - 1) / CHUNK);
    Carver for_item(nullptr), for_block(nullptr), for_part(nullptr);
    Prepared<Dot>::carve(for_item, call, s);
    Block<Dot>::carve(for_block, s);
    Partial::carve(for_part, s);
    const Scratch scratch(for_item.used() + for_block.used() * threads + for_part.used() * chunks);
    if (!scratch) return NO_MEMORY;
    char *blocks = scratch.base() + for_item.used(), *parts = blocks + for_block.used() * threads;
    const auto part = [&](int64_t chunk) {
        Carver carver(parts + chunk * for_part.used());
        return Partial::carve(carver, s);
    };
    Carver carver(scratch.base());
    Prepared<Dot> prepared = Prepared<Dot>::carve(carver, call, s);
    for (int64_t number = 0; number < count_items(call); number++) {
        const Item item(call, number);
        if (const Status failure = prepared.collect(call, item)) return failure;
        prepared.pack(call, s, item);
        Partial whole = part(0);
        whole.clear(s);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (int64_t j = 0; j < prepared.used; j += CHUNK) {
            Carver own(blocks + omp_get_thread_num() * for_block.used());
            Block<Dot> block = Block<Dot>::carve(own, s);
            Partial state = part(j / CHUNK);
            attend_chunk(call, s, item, prepared, j, block, state);
        }
        for (int64_t j = CHUNK; j < prepared.used; j += CHUNK) merge(s, part(j / CHUNK), whole);
        finish(call, s, item, whole);
    }
    return OK;
}

template <class Dot> int64_t run(AttentionCall& call) {
    const Shape<Dot> shape(call);
    const double rows = double(call.lengths.batch * call.lengths.rows) * double(call.count);
    const double work = rows * double(call.heads) * double(call.width + call.rope_width + call.value_width);
    const int64_t threads = work < WORTH_A_THREAD ? 1 : std::max<int64_t>(call.threads, 1);
    const bool few = threads > 1 && count_items(call) < 4 * threads;
    return few ? over_chunks<Dot>(call, shape, threads) : over_items<Dot>(call, shape, threads);
}

}  // namespace k31

K31_EXPORT int64_t k31_sparse_attention_size() { return sizeof(k31::AttentionCall); }

K31_EXPORT int64_t k31_sparse_attention(k31::AttentionCall* call) {
    bool pairs = k31::PAIRS;
    for (const k31::Operand* operand : {&call->query, &call->query_rope, &call->key, &call->key_rope, &call->value})
        pairs = pairs && (operand->dtype == k31::BFLOAT16 || !operand->data);
    return pairs ? k31::run<k31::PairDot>(*call) : k31::run<k31::FloatDot>(*call);
}
