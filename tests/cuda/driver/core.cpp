// The state itself, reports, random numbers, and what every driver call does first.
#include <algorithm>

#include "state.h"

namespace sim {

State &state() {
    static State *one = [] {
        auto *made = new State;  // never destroyed: Python frees its objects after static destructors have run
        const int64_t defaults[kSettings] = {1, 1, 0, int64_t(1) << 30, int64_t(4) << 30, 2000, 6000, 25000, 8000,
                                             -1, -1, -1, -1, 75};
        std::copy(defaults, defaults + kSettings, made->settings.begin());
        return made;
    }();
    return *one;
}

const char *setting_name(int setting) {
    const char *names[kSettings] = {"checker", "uninitialised", "trace", "device_bytes", "host_bytes", "host_call_ns",
                                    "copy_ns", "copy_bytes_per_us", "kernel_ns", "fail_alloc_after",
                                    "fail_host_alloc_after", "fail_launch_after", "fail_copy_after",
                                    "compute_capability"};
    return names[setting];
}

std::vector<Context *> &context_stack() {
    thread_local std::vector<Context *> *stack = new std::vector<Context *>;  // outlives the thread's destructors
    return *stack;
}

Context *current() { return context_stack().empty() ? nullptr : context_stack().back(); }

void count(const std::string &key, uint64_t by) { state().counters[key] += by; }

void report(const std::string &kind, const std::string &what) {
    State &s = state();
    s.reports_total++;
    if (s.reports.size() < 200) s.reports.push_back(kind + ": " + what);
}

uint64_t random_number() {  // splitmix64
    uint64_t z = (state().random += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

double random_unit() { return double(random_number() >> 11) * 0x1p-53; }

bool injected_failure(Setting what) {
    int64_t &left = state().settings[what];
    if (left < 0) return false;
    if (left == 0) {
        count("injected_failures");
        return true;
    }
    left--;
    return false;
}

Enter::Enter(const char *name, int need) : held(state().lock) {
    State &s = state();
    std::string plain(name);
    if (plain.size() > 3 && plain.compare(plain.size() - 3, 2, "_v") == 0) plain.resize(plain.size() - 3);
    count("call:" + plain);
    if ((need & (kInit | kContext)) && !s.initialised) error = CUDA_ERROR_NOT_INITIALIZED;
    else if ((need & kHealthy) && s.sticky != CUDA_SUCCESS) error = s.sticky;
    else if ((need & kContext) && (!current() || !current()->alive)) error = CUDA_ERROR_INVALID_CONTEXT;
}

}  // namespace sim

// A symbol that PyCUDA links to and nobody has written (stubs.cpp, made by the build): loud, not a false success.
extern "C" int sim_unsupported(const char *name) {
    std::lock_guard<std::recursive_mutex> held(sim::state().lock);
    sim::count("unsupported");
    sim::count(std::string("unsupported:") + name);
    return CUDA_ERROR_NOT_SUPPORTED;
}
