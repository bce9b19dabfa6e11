// Programs: libraries that AOTInductor built, called one after the other in one call from Python. kernels/programs.py
// says what a program is told as, and writes it so.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "torch_programs.h"

namespace k31 {
namespace {

using Tensors = std::vector<at::Tensor>;
using Places = std::vector<size_t>;

// Threads that meet in one library run side by side; only above this many do they wait for each other.
constexpr size_t MOST_AT_ONCE = 8;

// What a tensor has to look like: a library reads its memory by what was known when it was built.
struct Like {
    explicit Like(const at::Tensor& x) : dtype(x.scalar_type()), sizes(x.sizes().vec()), strides(x.strides().vec()) {}

    bool is_like(const at::Tensor& x) const {
        return x.defined() && x.is_cpu() && x.layout() == c10::kStrided && x.scalar_type() == dtype &&
               x.sizes() == c10::IntArrayRef(sizes);
    }
    // The stride of a dimension of one element says nothing.
    bool lies_as(const at::Tensor& x) const {
        const c10::IntArrayRef others = x.strides();
        for (size_t d = 0; d < sizes.size(); d++)
            if (strides[d] != others[d] && sizes[d] > 1) return false;
        return true;
    }
    at::Tensor laid_out(const at::Tensor& x) const { return at::empty_strided(sizes, strides, x.options()).copy_(x); }

    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
};

// Reads what Python wrote; what does not end where it should is an error.
class Told {
  public:
    Told(std::vector<int64_t> numbers, const c10::IValue& shapes) : numbers_(std::move(numbers)) {
        for (const c10::IValue& one : shapes.toListRef()) shapes_.emplace_back(one.toTensor());
    }
    int64_t number() {
        TORCH_CHECK(at_ < numbers_.size(), "a program ends too early");
        return numbers_[at_++];
    }
    size_t place(size_t below) {
        const int64_t read = number();
        TORCH_CHECK(read >= 0 && size_t(read) < below, "a program has no place ", read);
        return size_t(read);
    }
    Places places(size_t below) {
        Places read(place(numbers_.size() + 1));
        for (size_t& one : read) one = place(below);
        return read;
    }
    const Like& shape() { return shapes_[place(shapes_.size())]; }
    std::vector<Like> shapes() {
        std::vector<Like> read;
        for (size_t place : places(shapes_.size())) read.push_back(shapes_[place]);
        return read;
    }
    void end() const { TORCH_CHECK(at_ == numbers_.size(), "a program goes on behind its end"); }

  private:
    std::vector<int64_t> numbers_;
    std::vector<Like> shapes_;
    size_t at_ = 0;
};

class Library {
  public:
    Library(const std::string& path, Told& told)
        : runner_(path, MOST_AT_ONCE), inputs_(told.shapes()), written_(told.places(inputs_.size())), outputs_(told.shapes()) {}

    Tensors run(Tensors given) {
        TORCH_CHECK(given.size() == inputs_.size(), "a library takes ", inputs_.size(), " tensors and got ", given.size());
        for (size_t i = 0; i < given.size(); i++) {
            TORCH_CHECK(inputs_[i].is_like(given[i]), "input ", i, " of a library is not what it was built for");
            if (inputs_[i].lies_as(given[i])) continue;
            for (size_t place : written_) TORCH_CHECK(place != i, "input ", i, " of a library is written and lies otherwise");
            given[i] = inputs_[i].laid_out(given[i]);
        }
        Tensors made = runner_.boxed_run(std::move(given));
        TORCH_CHECK(made.size() == outputs_.size(), "a library gave ", made.size(), " tensors");
        for (size_t i = 0; i < made.size(); i++) {
            TORCH_CHECK(outputs_[i].is_like(made[i]), "output ", i, " of a library is not what it was built for");
            if (!outputs_[i].lies_as(made[i])) made[i] = outputs_[i].laid_out(made[i]);
        }
        return made;
    }
    size_t count_outputs() const { return outputs_.size(); }

  private:
    torch::inductor::AOTIModelContainerRunnerCpu runner_;
    std::vector<Like> inputs_;
    Places written_;
    std::vector<Like> outputs_;
};

// A call of a library; or, where there is none, a view of a value.
struct Step {
    Library* library;
    Places from, to, last;  // values read, made, and read for the last time
    Like view;
    int64_t offset;
};

class Program {
  public:
    Program(const c10::IValue& paths, Told& told) : count_inputs_(size_t(told.number())), count_values_(size_t(told.number())) {
        for (const c10::IValue& path : paths.toListRef())
            libraries_.push_back(std::make_unique<Library>(path.toStringRef(), told));
        for (int64_t left = told.number(); left > 0; left--) {
            const int64_t library = told.number();
            Step step{nullptr, told.places(count_values_), told.places(count_values_), told.places(count_values_), told.shape(), told.number()};
            if (library >= 0) step.library = libraries_.at(size_t(library)).get();
            TORCH_CHECK(step.library ? step.to.size() == step.library->count_outputs() : step.from.size() == 1 && step.to.size() == 1,
                        "a step of a program makes something else");
            steps_.push_back(std::move(step));
        }
        outputs_ = told.places(count_values_);
        told.end();
    }

    Tensors run(const c10::IValue& inputs) {
        Tensors values(count_values_);
        const auto given = inputs.toListRef();
        TORCH_CHECK(given.size() == count_inputs_ && count_inputs_ <= count_values_, "a program takes ", count_inputs_, " tensors");
        for (size_t i = 0; i < given.size(); i++) values[i] = given[i].toTensor();
        for (const Step& step : steps_) {
            Tensors made;
            if (step.library) {
                Tensors taken;
                taken.reserve(step.from.size());
                for (size_t place : step.from) taken.push_back(values[place]);
                made = step.library->run(std::move(taken));
            } else {
                const at::Tensor& base = values[step.from[0]];
                made.push_back(at::as_strided(base, step.view.sizes, step.view.strides, base.storage_offset() + step.offset));
            }
            for (size_t i = 0; i < made.size(); i++) values[step.to[i]] = std::move(made[i]);
            for (size_t place : step.last) values[place].reset();
        }
        Tensors outputs;
        for (size_t place : outputs_) outputs.push_back(values[place]);
        return outputs;
    }

  private:
    size_t count_inputs_, count_values_;
    std::vector<std::unique_ptr<Library>> libraries_;
    std::vector<Step> steps_;
    Places outputs_;
};

class Programs {
  public:
    int64_t open(const c10::IValue& paths, Told& told) {
        auto made = std::make_shared<Program>(paths, told);
        const std::unique_lock lock(mutex_);
        known_.emplace(++newest_, std::move(made));
        return newest_;
    }
    void close(int64_t number) {
        std::shared_ptr<Program> last;  // libraries are unloaded outside of the lock
        const std::unique_lock lock(mutex_);
        const auto found = known_.find(number);
        if (found == known_.end()) return;
        last = std::move(found->second);
        known_.erase(found);
    }
    std::shared_ptr<Program> find(int64_t number) {
        const std::shared_lock lock(mutex_);
        const auto found = known_.find(number);
        TORCH_CHECK(found != known_.end(), "there is no program ", number, " in this process");
        return found->second;
    }
    static Programs& all() {
        // Never destroyed: a library may still be called while the process ends.
        static Programs* const programs = new Programs;
        return *programs;
    }

  private:
    std::shared_mutex mutex_;
    std::unordered_map<int64_t, std::shared_ptr<Program>> known_;
    int64_t newest_ = 0;
};

struct Open final : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
        const std::vector<c10::IValue> arguments(stack->end() - 3, stack->end());
        Told told(arguments[1].toIntVector(), arguments[2]);
        const int64_t number = Programs::all().open(arguments[0], told);
        torch::jit::drop(*stack, 3);
        torch::jit::push(*stack, number);
    }
};

struct Run final : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
        const std::shared_ptr<Program> program = Programs::all().find(torch::jit::peek(*stack, 0, 2).toInt());
        const c10::IValue inputs = torch::jit::pop(*stack);
        torch::jit::drop(*stack, 1);
        // The casts of autocast are in the libraries; the operators that they call must not cast again.
        const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
        torch::jit::push(*stack, c10::List<at::Tensor>(program->run(inputs)));
    }
};

struct Close final : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
        Programs::all().close(torch::jit::pop(*stack).toInt());
    }
};

template <class Functor>
bool serve(const char* name) {
    // For all devices and none: what a program takes it looks at itself.
    constexpr auto KEY = c10::DispatchKey::CompositeImplicitAutograd;
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    const c10::OperatorName full(name, "");
    const auto found = dispatcher.findSchema(full);
    if (!found || found->hasKernelForDispatchKey(KEY)) return false;
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Functor>());
    // Never undone: the handle outlives the process.
    new c10::RegistrationHandleRAII(
        dispatcher.registerImpl(full, KEY, std::move(kernel), std::nullopt, nullptr, "k31compile/kernels/cpu/torch_programs.cpp"));
    return true;
}

}  // namespace

bool serve_programs() {
    return serve<Open>("k31::open_program") && serve<Run>("k31::run_program") && serve<Close>("k31::close_program");
}

}  // namespace k31
