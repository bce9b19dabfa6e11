// Where torch's memory lies, in this process and in the emulated one alike: an address in a call means the same in both.
#pragma once
#include <cstddef>
#include <sys/mman.h>

inline void* map_arena(int file, std::size_t address, std::size_t bytes) {
    void* wanted = reinterpret_cast<void*>(address);
    void* got = mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (got == wanted) return got;
    if (got != MAP_FAILED) munmap(got, bytes);
    return nullptr;
}
