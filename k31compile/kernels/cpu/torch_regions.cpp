// `k31::call_region`: a nested region as one call of torch's. What it runs is a library that AOTInductor built of the
// region's body; which one is told by name, so that a graph that calls regions can be such a library itself.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "torch_regions.h"

namespace k31 {
namespace {

// Threads that meet in one body run side by side, and only above this many wait for each other.
constexpr size_t MOST_AT_ONCE = 8;

// What a tensor has to look like: the library reads its memory by what was known when it was built.
struct Like {
    explicit Like(const at::Tensor& x)
        : dtype(x.scalar_type()), sizes(x.sizes().vec()), strides(x.strides().vec()) {}

    bool has_sizes_of(const at::Tensor& x) const {
        return x.defined() && x.is_cpu() && x.layout() == c10::kStrided && x.scalar_type() == dtype &&
               x.sizes() == c10::IntArrayRef(sizes);
    }
    // Where there is one element or none along a dimension its stride says nothing.
    bool lies_as(const at::Tensor& x) const {
        const c10::IntArrayRef others = x.strides();
        for (size_t d = 0; d < sizes.size(); d++)
            if (strides[d] != others[d] && sizes[d] > 1) return false;
        return true;
    }
    at::Tensor laid_out(const at::Tensor& x) const {
        return at::empty_strided(sizes, strides, x.options()).copy_(x);
    }

    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
};

std::vector<Like> all_like(const c10::IValue& tensors) {
    std::vector<Like> made;
    for (const c10::IValue& one : tensors.toListRef()) made.emplace_back(one.toTensor());
    return made;
}

class Region {
  public:
    Region(const std::string& library, std::vector<int64_t> order, const c10::IValue& inputs, const c10::IValue& outputs)
        : runner_(library, MOST_AT_ONCE), order_(std::move(order)), inputs_(all_like(inputs)), outputs_(all_like(outputs)) {
        TORCH_CHECK(order_.size() == inputs_.size(), "a region of ", inputs_.size(), " inputs, ", order_.size(), " told");
        for (int64_t place : order_)
            TORCH_CHECK(place >= 0 && place < int64_t(order_.size()), "a region has no input ", place);
    }

    // `given` are the inputs that are written, then the others.
    std::vector<at::Tensor> run(const std::vector<at::Tensor>& given, size_t written) {
        TORCH_CHECK(given.size() == inputs_.size(), "a region takes ", inputs_.size(), " tensors and got ", given.size());
        std::vector<at::Tensor> inputs;
        inputs.reserve(given.size());
        for (size_t i = 0; i < inputs_.size(); i++) {
            const size_t place = size_t(order_[i]);
            const at::Tensor& x = given[place];
            TORCH_CHECK(inputs_[i].has_sizes_of(x), "input ", i, " of a region is not what it was built for");
            const bool is_right = inputs_[i].lies_as(x);
            TORCH_CHECK(is_right || place >= written, "input ", i, " of a region is written and lies otherwise");
            inputs.push_back(is_right ? x : inputs_[i].laid_out(x));
        }
        std::vector<at::Tensor> made = runner_.boxed_run(std::move(inputs));
        TORCH_CHECK(made.size() == outputs_.size(), "a region gave ", made.size(), " tensors");
        for (size_t i = 0; i < made.size(); i++) {
            TORCH_CHECK(outputs_[i].has_sizes_of(made[i]), "output ", i, " of a region is not what it was built for");
            if (!outputs_[i].lies_as(made[i])) made[i] = outputs_[i].laid_out(made[i]);
        }
        return made;
    }

    int64_t users = 1;

  private:
    torch::inductor::AOTIModelContainerRunnerCpu runner_;
    std::vector<int64_t> order_;
    std::vector<Like> inputs_, outputs_;
};

class Regions {
  public:
    // Equal libraries have equal names: the second to open one uses the first one's.
    void open(const std::string& name, const torch::jit::Stack& told) {
        {
            const std::unique_lock lock(mutex_);
            if (const auto found = known_.find(name); found != known_.end()) return void(found->second->users++);
        }
        auto made = std::make_shared<Region>(told[1].toStringRef(), told[2].toIntVector(), told[3], told[4]);
        const std::unique_lock lock(mutex_);
        const auto [place, is_new] = known_.try_emplace(name, made);
        if (!is_new) place->second->users++;
    }
    void close(const std::string& name) {
        std::shared_ptr<Region> last;  // a library is unloaded outside of the lock
        const std::unique_lock lock(mutex_);
        const auto found = known_.find(name);
        if (found == known_.end() || --found->second->users > 0) return;
        last = std::move(found->second);
        known_.erase(found);
    }
    std::shared_ptr<Region> find(const std::string& name) {
        const std::shared_lock lock(mutex_);
        const auto found = known_.find(name);
        TORCH_CHECK(found != known_.end(), "there is no region ", name, " in this process");
        return found->second;
    }
    static Regions& all() {
        // Never destroyed: a library may still be called while the process ends.
        static Regions* const regions = new Regions;
        return *regions;
    }

  private:
    std::shared_mutex mutex_;
    std::unordered_map<std::string, std::shared_ptr<Region>> known_;
};

void add(std::vector<at::Tensor>& to, const c10::IValue& list) {
    for (const c10::IValue& one : list.toListRef()) to.push_back(one.toTensor());
}

class Call final : public c10::OperatorKernel {
  public:
    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
        const size_t count = op.schema().arguments().size();
        const auto arguments = torch::jit::last(*stack, count);
        const std::shared_ptr<Region> region = Regions::all().find(arguments[0].toStringRef());
        std::vector<at::Tensor> given;
        for (size_t i = 1; i < count; i++) add(given, arguments[i]);
        const size_t written = count == 3 ? arguments[1].toListRef().size() : 0;
        // The casts of autocast are in the library; the operators that it calls must not cast again.
        const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
        std::vector<at::Tensor> made = region->run(given, written);
        torch::jit::drop(*stack, count);
        torch::jit::push(*stack, c10::List<at::Tensor>(std::move(made)));
    }
};

class Open final : public c10::OperatorKernel {
  public:
    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
        const torch::jit::Stack told(stack->end() - 5, stack->end());
        torch::jit::drop(*stack, 5);
        Regions::all().open(told[0].toStringRef(), told);
    }
};

class Close final : public c10::OperatorKernel {
  public:
    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
        const std::string name = torch::jit::pop(*stack).toStringRef();
        Regions::all().close(name);
    }
};

template <class Functor>
bool serve(const char* name, c10::DispatchKey key) {
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    const c10::OperatorName full(name, "");
    const auto found = dispatcher.findSchema(full);
    if (!found || found->hasKernelForDispatchKey(key)) return false;
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Functor>());
    // Never undone: the handle outlives the process.
    new c10::RegistrationHandleRAII(
        dispatcher.registerImpl(full, key, std::move(kernel), std::nullopt, nullptr, "k31compile/kernels/cpu/torch_regions.cpp"));
    return true;
}

}  // namespace

bool serve_regions() {
    const bool calls = serve<Call>("k31::call_region", c10::DispatchKey::CPU) &&
                       serve<Call>("k31::call_region_", c10::DispatchKey::CPU);
    return calls && serve<Open>("k31::open_region", c10::DispatchKey::CompositeImplicitAutograd) &&
           serve<Close>("k31::close_region", c10::DispatchKey::CompositeImplicitAutograd);
}

}  // namespace k31
