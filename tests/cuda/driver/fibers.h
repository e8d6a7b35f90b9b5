// The runtime that runs a grid on one host thread: a block's threads are fibers with stacks of their own, which change
// places at barriers and warp operations only. Linked into every kernel module, never instrumented.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "sim.h"

namespace sim {

// Read by every kernel through threadIdx and the like; set whenever a fiber is entered.
struct Now {
    uint32_t thread_index[3], block_index[3], block_size[3], grid_size[3];
};
extern Now now;

enum Meeting { MEET_SYNC, MEET_MAX, MEET_SUM, MEET_QUAD, MEET_QUAD_MAX, MEET_MMA };

void run_grid(const SimLaunch *launch, void (*enter)(const void *args));

void block_wait(int line);
// All 32 lanes of the warp must arrive, from the same line. Each brings `count` floats, which are replaced by the result.
void meet(Meeting what, float *values, int count, int line);
static inline void meet_sync(int line) { meet(MEET_SYNC, nullptr, 0, line); }
static inline float meet_one(Meeting what, float value, int line) {
    meet(what, &value, 1, line);
    return value;
}
// mma.m16n8k16 with f16 products: c += a b, a lane's registers as the PTX ISA has them. They travel through the lanes' own
// stacks, so nothing of this is an access to memory that could race.
static inline void meet_mma(float *c, const unsigned *a, const unsigned *b, int line) {
    float registers[10];
    __builtin_memcpy(registers, c, 16);
    __builtin_memcpy(registers + 4, a, 16);
    __builtin_memcpy(registers + 8, b, 8);
    meet(MEET_MMA, registers, 10, line);
    __builtin_memcpy(c, registers, 16);
}

void *dynamic_shared();
void *static_shared(const void *key, size_t bytes);

// --- for hooks.cpp -----------------------------------------------------------------------------------------------------

// Where a thread stands: two accesses of one block are ordered when one thread made both, when a barrier of the block lies
// between them (`barrier`), or, in one warp, a warp_sync (`warp_step`). Reductions order nothing.
struct Stamp {
    uint32_t block;  // a number no other block of the process has had
    uint32_t barrier, warp_step;
    uint16_t thread, used;  // `used` 0: no access
    uint16_t warp() const { return thread / 32; }
};

struct Watch {
    bool active;                             // a fiber is running
    uintptr_t shared_begin, shared_end;      // the whole arena
    uintptr_t dynamic_end, static_begin;     // in use: [shared_begin, dynamic_end) and [static_begin, shared_end)
    uintptr_t stacks_begin, stacks_end;
    uintptr_t args_begin, args_end;
    uint32_t first_block;                    // the first block number of this launch
    Stamp at;
    const SimHost *host;
};
extern Watch watch;

[[noreturn]] void stop_launch(const char *format, ...) __attribute__((format(printf, 1, 2)));
void tell(const char *kind, const char *format, ...) __attribute__((format(printf, 2, 3)));  // once per kind and launch

}  // namespace sim
