// The interface between the simulated driver (libcuda.so.1, owner: driver) and a kernel module compiled for the host
// (runtime of fibers, access hooks, kernels; owner: kernels). Nothing here knows about PyCUDA or KV caches.
//
// A module image, as cuModuleLoadData takes it: the 8 bytes "KVSIMSO1", the length of what follows as a little-endian
// u64, then a shared object. The driver writes that object to a memfd and loads it with RTLD_LOCAL, so a module must be
// self-contained: it brings its own runtime, and reaches the driver only through `SimHost`.
//
// A module exports, with C linkage and default visibility:
//   int sim_attach(const SimHost *)                once, directly after loading; 0 when the version is the one it knows
//   void sim_kernel_<name>(const SimLaunch *)      the trampoline of a kernel: returns when the whole grid has run
//   const uint32_t sim_params_<name>               bytes of the packed arguments, without padding at the end
//   const uint32_t sim_static_shared_<name>        optional: bytes of static shared memory (limits, attributes)
//   void sim_source_<name>(args, at, bytes)        optional: the pinned memory that a launch with these arguments reads,
//                                                  so that it is hashed as the source of a copy is
//   const char *sim_fault(void)                    optional: what went wrong in the last launch, or null. Read once
//                                                  after each launch that returned; it makes the context's error sticky.
//
// A launch can also end in the middle: `access` does not return when the address is not valid, `abandon` never does, and
// a segmentation fault inside a launch (fast build) is turned into the same. The driver then leaves the launch with a
// longjmp, from whichever fiber ran. Destructors do not run. So whatever the runtime keeps between launches has to be
// set up anew at the beginning of each launch, and must not be needed to clean up.
//
// One launch runs at a time in a process, always on the stack of the thread that made the driver run it, which need not
// be the thread that launched. Packed arguments are the driver's own copy and stay valid during the launch.
#pragma once

#include <stdint.h>

#define SIM_VERSION 1u

enum { SIM_READ = 0, SIM_WRITE = 1, SIM_ATOMIC = 2 };  // `kind` of an access

typedef struct SimHost {
    uint32_t version;
    // Everything the driver hands out (device, managed and pinned memory) lies in [arena_begin, arena_end), and nothing
    // else does. Addresses outside (fiber stacks, shared memory, the module's own data) are the runtime's to judge.
    uintptr_t arena_begin, arena_end;
    // Checked build only: call it before each load, store or atomic operation of a kernel that touches the arena. It
    // checks bounds, liveness and initialisation, and feeds the happens-before checker, to the byte; a fault does not
    // return. It sees a launch as one operation: races between threads of one launch are for the runtime to find.
    // Any address may be passed: one outside the arena is a fault.
    void (*access)(uintptr_t address, uint32_t bytes, int kind);
    // Ends the launch with a sticky error; `what` is copied. Deadlock, divergent shuffle, stack overflow, wild address.
    void (*abandon)(const char *what) __attribute__((noreturn));
    // Adds a line to the reports that fail a test, and lets the launch go on. `kind` is one word ("race-shared").
    void (*report)(const char *kind, const char *what);
} SimHost;

typedef struct SimLaunch {
    const char *name;        // as passed to cuModuleGetFunction
    uint32_t grid[3], block[3];
    uint32_t shared_bytes;   // dynamic shared memory
    uint32_t args_bytes;     // always equal to sim_params_<name>
    const void *args;        // packed in C order with natural alignment
    uint64_t seed;           // decides the order of blocks and warps; the same seed must give the same order
} SimLaunch;

typedef int (*SimAttach)(const SimHost *host);
typedef void (*SimKernel)(const SimLaunch *launch);
typedef void (*SimSource)(const void *args, uintptr_t *at, uint64_t *bytes);
typedef const char *(*SimFault)(void);
