// A small kernel module for the tests of the driver itself: written against sim.h by hand, without fibers, so that a
// fault found here is the driver's. With TOY_CHECKED it calls the access hook as an instrumented kernel would.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "sim.h"

namespace {

const SimHost *host;
const char *fault;

#ifdef TOY_CHECKED
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif

float load(uint64_t at) {
    if (kChecked) host->access(at, 4, SIM_READ);
    float value;
    memcpy(&value, reinterpret_cast<const void *>(at), 4);
    return value;
}

void store(uint64_t at, float value) {
    if (kChecked) host->access(at, 4, SIM_WRITE);
    memcpy(reinterpret_cast<void *>(at), &value, 4);
}

struct Args {
    const uint8_t *at;
    explicit Args(const SimLaunch *launch) : at(static_cast<const uint8_t *>(launch->args)) {}
    template <class T> T take(size_t offset) const {
        T value;
        memcpy(&value, at + offset, sizeof value);
        return value;
    }
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int sim_attach(const SimHost *given) {
    host = given;
    return given->version == SIM_VERSION ? 0 : 1;
}

const char *sim_fault(void) {
    const char *now = fault;
    fault = nullptr;
    return now;
}

// toy_fill(u64 to, u32 n, f32 value)
extern const uint32_t sim_params_toy_fill = 16;
void sim_kernel_toy_fill(const SimLaunch *launch) {
    Args a(launch);
    for (uint32_t i = 0; i < a.take<uint32_t>(8); i++) store(a.take<uint64_t>(0) + 4 * i, a.take<float>(12));
}

// toy_fold(u64 state, u64 from, u32 n): state[0] = state[0] * 3 + the sum, modulo 1 to stay exact
extern const uint32_t sim_params_toy_fold = 20;
void sim_kernel_toy_fold(const SimLaunch *launch) {
    Args a(launch);
    uint64_t state = a.take<uint64_t>(0), from = a.take<uint64_t>(8);
    float sum = 0;
    for (uint32_t i = 0; i < a.take<uint32_t>(16); i++) sum += load(from + 4 * i);
    store(state, fmodf(load(state) * 3 + sum, 1000));
}

// toy_wild(u64 to, i64 offset): writes four bytes there
extern const uint32_t sim_params_toy_wild = 16;
void sim_kernel_toy_wild(const SimLaunch *launch) {
    Args a(launch);
    store(a.take<uint64_t>(0) + uint64_t(a.take<int64_t>(8)), 1.0f);
}

// toy_bump(u64 at): an atomic update
extern const uint32_t sim_params_toy_bump = 8;
void sim_kernel_toy_bump(const SimLaunch *launch) {
    uint64_t at = Args(launch).take<uint64_t>(0);
    if (kChecked) host->access(at, 4, SIM_ATOMIC);
    ++*reinterpret_cast<uint32_t *>(at);
}

extern const uint32_t sim_params_toy_fault = 0;
void sim_kernel_toy_fault(const SimLaunch *) { fault = "planted fault"; }

extern const uint32_t sim_params_toy_abandon = 0;
void sim_kernel_toy_abandon(const SimLaunch *) { host->abandon("planted deadlock"); }

extern const uint32_t sim_params_toy_report = 0;
void sim_kernel_toy_report(const SimLaunch *) { host->report("race-shared", "planted race"); }

// toy_order(u64 to): the launch's seed, so that a test can see what it depends on
extern const uint32_t sim_params_toy_order = 8;
void sim_kernel_toy_order(const SimLaunch *launch) {
    uint64_t at = Args(launch).take<uint64_t>(0);
    if (kChecked) host->access(at, 8, SIM_WRITE);
    memcpy(reinterpret_cast<void *>(at), &launch->seed, 8);
}

}  // extern "C"
#pragma GCC visibility pop
