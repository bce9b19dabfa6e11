// The operators as torch calls them, without Python: arguments from torch's stack to plain data, results back.
//
// A kernel here stands for the CPU alone. What it does not serve goes on, its stack untouched, to the operator's kernel
// for all devices, which is Python: checks, copies and error texts are there and nowhere else.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <array>
#include <atomic>

#include "call_values.h"
#include "simd.h"
#include "torch_programs.h"

namespace k31 {
namespace {

static_assert(Arguments::kind_of_dtype(int64_t(at::kFloat)) == IS_FLOAT32);
static_assert(Arguments::kind_of_dtype(int64_t(at::kBFloat16)) == IS_BFLOAT16);
static_assert(Arguments::kind_of_dtype(int64_t(at::kBool)) == IS_BOOL);
static_assert(Arguments::kind_of_dtype(int64_t(at::kInt)) == IS_INT32);
static_assert(Arguments::kind_of_dtype(int64_t(at::kLong)) == IS_INT64);

constexpr auto PYTHON = c10::DispatchKey::CompositeExplicitAutograd;
constexpr size_t MOST_ARGUMENTS = 32, MOST_RESULTS = 3;

struct Operator {
    const char* schema;  // what the function reads: an operator with another one is left alone
    Serve serve;
    std::atomic<int64_t> served{0}, passed_on{0};

    std::string_view name() const {
        const std::string_view all(schema);
        return all.substr(0, all.find('('));
    }
};

Operator OPERATORS[] = {
    {"lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
     "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', "
     "str layout_key='BSND', SymInt sparse_count=2048, int sparse_mode=3, str order='position', "
     "str tail='minus_one', Tensor? mask=None) -> Tensor",
     serve_lightning_indexer},
    {"sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *, "
     "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
     "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', "
     "str layout_kv='BSND', int sparse_mode=3, int attention_mode=2, Tensor? mask=None) -> Tensor",
     serve_sparse_flash_attention},
    {"kda_recurrent(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor initial_state, *, "
     "float scale=1.0, str state_layout='KV') -> (Tensor, Tensor)",
     serve_kda_recurrent},
    {"kda_recurrent_(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor(a!) state, *, "
     "Tensor? rows=None, float scale=1.0, str state_layout='KV') -> Tensor",
     serve_kda_recurrent_in_place},
    {"kda_chunk(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor? initial_state=None, *, "
     "Tensor? cu_seqlens=None, float scale=1.0, str state_layout='KV') -> (Tensor, Tensor)",
     serve_kda_chunk},
    {"gated_delta_recurrent(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor initial_state, *, "
     "float scale=1.0, str state_layout='KV') -> (Tensor, Tensor)",
     serve_gated_delta_recurrent},
    {"gated_delta_chunk(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, "
     "Tensor? initial_state=None, *, Tensor? cu_seqlens=None, float scale=1.0, str state_layout='KV') -> "
     "(Tensor, Tensor)",
     serve_gated_delta_chunk},
    {"attn_res_prepare(Tensor bank, Tensor queries, *, float eps, Tensor? valid=None, Tensor[]? more=None, "
     "bool mix=True) -> (Tensor, Tensor, Tensor)",
     serve_attn_res_prepare},
    {"attn_res_update(Tensor partial, Tensor? delta, Tensor maximum, Tensor total, Tensor mixture, Tensor query, *, "
     "float eps, Tensor? norm_weight=None, float norm_eps=1e-5, ScalarType? dtype=None, "
     "Tensor[]? bank=None, int? slot=None) -> (Tensor, Tensor)",
     serve_attn_res_update},
    {"short_conv(Tensor x, Tensor weight, *, Tensor? bias=None, Tensor? state=None, "
     "Tensor? actual_seq_lengths=None, str activation='silu') -> (Tensor, Tensor)",
     serve_short_conv},
    {"gated_rms_norm(Tensor x, Tensor gate, Tensor weight, *, float eps, str activation='sigmoid', "
     "bool norm_before_gate=True, str weight_cast='before', ScalarType? dtype=None) -> Tensor",
     serve_gated_rms_norm},
    {"skinny_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", serve_skinny_linear},
    {"mega_kda(Tensor[] x, Tensor[] conv_weight, Tensor[]? conv_state, Tensor raw_gate, Tensor a_log, "
     "Tensor? dt_bias, Tensor raw_beta, Tensor state, Tensor out_gate, Tensor norm_weight, *, float norm_eps, "
     "float? lower_bound=None, float l2_eps=1e-6, float beta_factor=1.0, float scale=1.0, str state_layout='KV', "
     "ScalarType? beta_dtype=None, ScalarType? core_dtype=None, str norm_activation='sigmoid', "
     "bool norm_before_gate=True, str weight_cast='before', ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)",
     serve_mega_kda},
    {"mega_kda_(Tensor[] x, Tensor[] conv_weight, Tensor[]? conv_state, Tensor raw_gate, Tensor a_log, "
     "Tensor? dt_bias, Tensor raw_beta, Tensor(a!) state, Tensor out_gate, Tensor norm_weight, *, Tensor? rows=None, "
     "float norm_eps, float? lower_bound=None, float l2_eps=1e-6, float beta_factor=1.0, float scale=1.0, "
     "str state_layout='KV', ScalarType? beta_dtype=None, ScalarType? core_dtype=None, "
     "str norm_activation='sigmoid', bool norm_before_gate=True, str weight_cast='before', ScalarType? dtype=None) -> "
     "(Tensor, Tensor)",
     serve_mega_kda_in_place},
    {"moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, int k_group=1, int group_count=1, "
     "int group_select_mode=1, float? group_fill=None, bool renorm=True, int norm_type=1, "
     "float routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor)",
     serve_moe_gating_top_k},
    {"grouped_experts(Tensor x, Tensor expert_idx, Tensor weights, Tensor[] gate_proj, Tensor[] up_proj, "
     "Tensor[] down_proj, *, str activation='situ', float situ_beta=4.0, float? linear_beta=25.0) -> Tensor",
     serve_grouped_experts},
};

Tensor seen(const at::Tensor& tensor) {
    at::TensorImpl* const x = tensor.unsafeGetTensorImpl();
    const c10::IntArrayRef sizes = x->sizes();
    Tensor to{nullptr, IS_OTHER, int64_t(sizes.size()), sizes.data(), nullptr};
    if (!x->device().is_cpu() || x->layout() != c10::kStrided || x->numel() == 0) return to;
    to.kind = Arguments::kind_of_dtype(int64_t(c10::typeMetaToScalarType(x->dtype())));
    to.strides = x->strides().data();
    // As `data_ptr()` gives it: what is shared until it is written is written from here on.
    to.data = static_cast<char*>(x->mutable_data());
    return to;
}

// The arguments of one call.
class Given {
  public:
    explicit Given(c10::ArrayRef<c10::IValue> stack) {
        for (const c10::IValue& one : stack) {
            Value& value = values_[count_++];
            if (one.isTensor()) read(one.toTensor(), value);
            else if (one.isNone()) value.type = Value::NOTHING;
            else if (one.isInt()) set(value, Value::INTEGER, one.toInt());
            else if (one.isBool()) set(value, Value::FLAG, one.toBool());
            else if (one.isDouble()) value.type = Value::NUMBER, value.number = one.toDouble();
            else if (one.isString()) value.type = Value::WORD, value.word = one.toStringView();
            else if (one.isTensorList()) read(one.toListRef(), value);
            else value.type = Value::UNREAD;
        }
    }
    const Value* values() const { return values_.data(); }
    int64_t count() const { return count_; }

  private:
    static void set(Value& value, Value::Type type, int64_t integer) {
        value.type = type;
        value.integer = integer;
    }
    static void read(const at::Tensor& tensor, Value& value) {
        // A Tensor that is none is given undefined.
        value.type = tensor.defined() ? Value::TENSOR : Value::UNREAD;
        if (tensor.defined()) value.tensor = seen(tensor);
    }
    void read(c10::ArrayRef<c10::IValue> list, Value& value) {
        lists_[used_].reserve(list.size());
        for (const c10::IValue& one : list) {
            if (!one.isTensor() || !one.toTensor().defined()) return void(value.type = Value::UNREAD);
            lists_[used_].push_back(seen(one.toTensor()));
        }
        set(value, Value::TENSORS, int64_t(list.size()));
        value.tensors = lists_[used_++].data();
    }

    std::array<Value, MOST_ARGUMENTS> values_;
    std::array<std::vector<Tensor>, 3> lists_;  // no schema has more
    int64_t count_ = 0;
    size_t used_ = 0;
};

class Made final : public Results {
  public:
    char* add(int64_t kind, const int64_t* sizes, int64_t dim) override {
        const at::ScalarType dtype = kind == IS_FLOAT32 ? at::kFloat : kind == IS_BFLOAT16 ? at::kBFloat16 : at::kInt;
        at::Tensor& made = made_[count_++];
        made = at::detail::empty_cpu(c10::IntArrayRef(sizes, size_t(dim)), dtype);
        return static_cast<char*>(made.unsafeGetTensorImpl()->mutable_data());
    }
    void push(torch::jit::Stack& stack) {
        for (size_t i = 0; i < count_; i++) stack.emplace_back(std::move(made_[i]));
    }

  private:
    std::array<at::Tensor, MOST_RESULTS> made_;
    size_t count_ = 0;
};

class Kernel final : public c10::OperatorKernel {
  public:
    explicit Kernel(Operator& op) : operator_(op) {}

    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
        if (serve(op.schema().arguments().size(), *stack)) {
            operator_.served.fetch_add(1, std::memory_order_relaxed);
            return;
        }
        operator_.passed_on.fetch_add(1, std::memory_order_relaxed);
        op.callBoxedForDispatchKey(PYTHON, *stack);
    }

  private:
    bool serve(size_t count, torch::jit::Stack& stack) const {
        const Given given(torch::jit::last(stack, count));
        Arguments arguments(given.values(), given.count(), at::get_num_threads());
        Made made;
        if (!operator_.serve(arguments, made)) return false;
        torch::jit::drop(stack, count);
        made.push(stack);
        return true;
    }

    Operator& operator_;
};

bool take_over(Operator& mine) {
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    const c10::FunctionSchema schema = torch::jit::parseSchema("k31::" + std::string(mine.schema));
    const auto found = dispatcher.findSchema(schema.operator_name());
    if (!found || !(found->schema() == schema) || schema.arguments().size() > MOST_ARGUMENTS) return false;
    if (found->hasKernelForDispatchKey(c10::DispatchKey::CPU) || !found->hasKernelForDispatchKey(PYTHON)) return false;
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(mine));
    // Never undone: the handle outlives the process.
    new c10::RegistrationHandleRAII(dispatcher.registerImpl(
        schema.operator_name(), c10::DispatchKey::CPU, std::move(kernel), std::nullopt, nullptr, "k31compile/kernels/cpu/torch_calls.cpp"));
    return true;
}

}  // namespace
}  // namespace k31

// Serve the operators from here on; how many of those that are known here were taken over, and how many are known.
K31_EXPORT int64_t k31_take_over_calls(int64_t* known) {
    int64_t taken = 0;
    *known = 0;
    for (k31::Operator& mine : k31::OPERATORS) {
        ++*known;
        taken += k31::take_over(mine);
    }
    ++*known;
    taken += k31::serve_programs();
    return taken;
}

// How many calls of an operator were served here and how many were passed on to Python; -1 where it is not known.
K31_EXPORT int64_t k31_count_calls(const char* name, int64_t* served, int64_t* passed_on) {
    for (const k31::Operator& mine : k31::OPERATORS) {
        if (mine.name() != name) continue;
        *served = mine.served.load(std::memory_order_relaxed);
        *passed_on = mine.passed_on.load(std::memory_order_relaxed);
        return 0;
    }
    return -1;
}
