// Gives torch its memory on the CPU from a file that another process maps too.
#include "arena.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <vector>

namespace {

constexpr std::size_t ALIGNMENT = 64;

// Blocks of powers of two, each behind a line that holds its power; what was freed is given out again.
class Arena final : public c10::Allocator {
  public:
    void open(char* from, std::size_t bytes) { next_ = from, end_ = from + bytes; }

    c10::DataPtr allocate(std::size_t bytes) override {
        void* block = bytes ? take(bytes) : nullptr;
        return {block, block, &Arena::release, c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &Arena::release; }

    void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  private:
    void* take(std::size_t bytes) {
        std::size_t power = 6;
        while ((std::size_t(1) << power) < bytes) power++;
        const std::lock_guard<std::mutex> held(lock_);
        auto& kept = kept_[power];
        if (!kept.empty()) {
            void* block = kept.back();
            kept.pop_back();
            return block;
        }
        const std::size_t all = ALIGNMENT + (std::size_t(1) << power);
        TORCH_CHECK(std::size_t(end_ - next_) >= all, "the shared memory is used up");
        char* block = next_ + ALIGNMENT;
        next_ += all;
        reinterpret_cast<std::size_t*>(block)[-1] = power;
        return block;
    }

    static void release(void* block);

    char *next_ = nullptr, *end_ = nullptr;
    std::mutex lock_;
    std::vector<void*> kept_[64];
};

Arena& arena() {
    static Arena& one = *new Arena;  // never destroyed: tensors outlive what is static
    return one;
}

void Arena::release(void* block) {
    if (!block) return;
    const std::lock_guard<std::mutex> held(arena().lock_);
    arena().kept_[static_cast<std::size_t*>(block)[-1]].push_back(block);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int serve_torch(int file, std::size_t address, std::size_t bytes) {
    void* mapped = map_arena(file, address, bytes);
    if (!mapped) return 1;
    arena().open(static_cast<char*>(mapped), bytes);
    c10::SetCPUAllocator(&arena(), 1);
    return 0;
}
