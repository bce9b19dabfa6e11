// Runs the kernels of a library in a process of its own: argv is library, file, address and bytes of the shared memory.
// Of each line "function address" it calls the function with that address and answers with what it returned.
#include "arena.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>

int main(int, char** argv) {
    if (!map_arena(std::atoi(argv[2]), std::strtoull(argv[3], nullptr, 0), std::strtoull(argv[4], nullptr, 0)))
        return std::fprintf(stderr, "the shared memory does not map there\n"), 1;
    void* library = dlopen(argv[1], RTLD_NOW);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    char name[128];
    unsigned long long address;
    while (std::scanf("%127s %llu", name, &address) == 2) {
        auto function = reinterpret_cast<int64_t (*)(void*)>(dlsym(library, name));
        if (!function) return std::fprintf(stderr, "no %s\n", name), 1;
        std::printf("%lld\n", static_cast<long long>(function(reinterpret_cast<void*>(address))));
        std::fflush(stdout);
    }
}
