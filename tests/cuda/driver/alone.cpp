// Runs kernel modules without a driver: one launch after the other, as soon as it is asked for. What the simulated driver
// gives a module (sim.h), in its smallest form, so that kernels can be tested by themselves (tests/cuda/alone.py).
#include <dlfcn.h>
#include <setjmp.h>
#include <string.h>
#include <sys/mman.h>

#include <string>
#include <vector>

#include "sim.h"

namespace {

constexpr uintptr_t ARENA = uintptr_t(4) << 30, GAP = 4096;

struct Range {
    uintptr_t begin, end;
    std::vector<bool> written;  // empty: all of it, by the host
};

uintptr_t arena_begin, arena_next;
std::vector<Range> ranges;
std::string reports, error;
sigjmp_buf back;

__attribute__((noreturn)) void leave(const char *what) {
    error = what;
    siglongjmp(back, 1);
}

void on_access(uintptr_t address, uint32_t bytes, int kind) {
    for (size_t n = ranges.size(); n-- > 0;) {
        Range &range = ranges[n];
        if (address < range.begin) continue;
        if (address + bytes > range.end) break;
        if (range.written.empty()) return;
        for (uintptr_t at = address - range.begin; at < address - range.begin + bytes; ++at) {
            if (kind != SIM_READ) range.written[at] = true;
            else if (!range.written[at]) leave(("reads byte " + std::to_string(at) + " of array " + std::to_string(n) +
                                                ", which nobody has written").c_str());
        }
        return;
    }
    leave(((kind == SIM_READ ? "reads " : "writes ") + std::to_string(bytes) + " bytes outside of every array").c_str());
}

__attribute__((noreturn)) void on_abandon(const char *what) { leave(what); }
void on_report(const char *kind, const char *what) { reports += std::string(kind) + ": " + what + "\n"; }

SimHost host;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void alone_clear();

uintptr_t alone_open() {
    if (arena_begin) {
        alone_clear();
        return arena_begin;
    }
    void *got = mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return 0;
    arena_begin = arena_next = uintptr_t(got);
    host = {SIM_VERSION, arena_begin, arena_begin + ARENA, on_access, on_abandon, on_report};
    return arena_begin;
}

void alone_clear() {
    madvise(reinterpret_cast<void *>(arena_begin), arena_next - arena_begin, MADV_DONTNEED);
    arena_next = arena_begin;
    ranges.clear();
    reports.clear();
}

// `written` 0: reading a byte that no kernel has written is an error.
uintptr_t alone_alloc(uint64_t bytes, int written) {
    if (arena_next + bytes + 2 * GAP > arena_begin + ARENA) return 0;
    const uintptr_t at = arena_next + GAP;
    arena_next = (at + bytes + 255) & ~uintptr_t(255);
    ranges.push_back({at, at + bytes, std::vector<bool>(written ? 0 : bytes, false)});
    if (!written) memset(reinterpret_cast<void *>(at), 0xcb, bytes);
    return at;
}

void *alone_load(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        error = dlerror();
        return nullptr;
    }
    auto attach = reinterpret_cast<SimAttach>(dlsym(library, "sim_attach"));
    return attach && attach(&host) == 0 ? library : nullptr;
}

const char *alone_error() { return error.c_str(); }
const char *alone_reports() { return reports.c_str(); }

// 0, or 1 with the reason in alone_error.
int alone_launch(void *library, const char *name, const uint32_t *grid, const uint32_t *block, uint32_t shared_bytes,
                 const void *args, uint32_t args_bytes, uint64_t seed) {
    auto kernel = reinterpret_cast<SimKernel>(dlsym(library, (std::string("sim_kernel_") + name).c_str()));
    auto params = static_cast<const uint32_t *>(dlsym(library, (std::string("sim_params_") + name).c_str()));
    error.clear();
    if (!kernel || !params) error = "there is no such kernel";
    else if (*params != args_bytes) error = "it takes " + std::to_string(*params) + " bytes of arguments";
    if (!error.empty()) return 1;
    SimLaunch launch = {name, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes, args_bytes, args, seed};
    if (sigsetjmp(back, 0) == 0) kernel(&launch);
    return error.empty() ? 0 : 1;
}

}
