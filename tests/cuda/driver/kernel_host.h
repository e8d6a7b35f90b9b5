// Force-included before every .cu when g++ compiles it for the simulated driver: what nvcc and kvstream/cuda/kernels/
// port.cuh give a kernel, given by ordinary C++ and the runtime of fibers (fibers.h). Self-contained: no CUDA headers.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include <tuple>
#include <utility>

#include "fibers.h"
#include "sim.h"

#ifndef KVS_SIM
#define KVS_SIM 1
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static_assert(false, "use SHARED(T, name, count): a static array could not be watched");

struct dim3 {
    unsigned x, y, z;
};
#define threadIdx (*reinterpret_cast<const dim3 *>(sim::now.thread_index))
#define blockIdx (*reinterpret_cast<const dim3 *>(sim::now.block_index))
#define blockDim (*reinterpret_cast<const dim3 *>(sim::now.block_size))
#define gridDim (*reinterpret_cast<const dim3 *>(sim::now.grid_size))

// --- the arena of shared memory: poisoned for every block, guarded, and watched in the checked build -------------------

#define SHARED(T, name, count)        \
    static const char name##_key = 0; \
    T *const name = static_cast<T *>(sim::static_shared(&name##_key, sizeof(T) * (count)))
#define DYN_SHARED(T, name) T *const name = static_cast<T *>(sim::dynamic_shared())

// --- trampolines -------------------------------------------------------------------------------------------------------

namespace sim {

#define UNWATCHED __attribute__((no_sanitize_thread))  // what runs between launches

struct Source {
    uintptr_t at;
    size_t size;
};

template <class... A>
struct Packed {  // C order, natural alignment, no padding at the end: as PyCUDA packs them
    static constexpr size_t offset(size_t which) {
        constexpr size_t sizes[] = {sizeof(A)..., 0}, aligns[] = {alignof(A)..., 1};
        size_t at = 0;
        for (size_t n = 0;; ++n) {
            at = (at + aligns[n] - 1) / aligns[n] * aligns[n];
            if (n == which) return at;
            at += sizes[n];
        }
    }
    static constexpr uint32_t size = uint32_t(offset(sizeof...(A)));
    template <void (*KERNEL)(A...), size_t... I>
    static void call(const char *args, std::index_sequence<I...>) {
        KERNEL(*reinterpret_cast<const A *>(args + offset(I))...);
    }
    template <void (*KERNEL)(A...)>
    static void enter(const void *args) {
        call<KERNEL>(static_cast<const char *>(args), std::index_sequence_for<A...>());
    }
    template <Source (*READS)(A...), size_t... I>
    UNWATCHED static Source ask_for(const char *args, std::index_sequence<I...>) {
        return READS(*reinterpret_cast<const A *>(args + std::integral_constant<size_t, offset(I)>::value)...);
    }
    template <Source (*READS)(A...)>
    UNWATCHED static Source ask(const void *args) {
        return ask_for<READS>(static_cast<const char *>(args), std::index_sequence_for<A...>());
    }
};
template <class... A>
Packed<A...> packed(void (*)(A...));

}  // namespace sim

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))
#define SIM_KERNEL(name)                                                            \
    SIM_EXPORT const uint32_t sim_params_##name = decltype(sim::packed(name))::size; \
    SIM_EXPORT void sim_kernel_##name(const SimLaunch *launch) {                    \
        sim::run_grid(launch, decltype(sim::packed(name))::enter<name>);            \
    }

// The host memory that a launch reads, out of its arguments: the driver then sees when the host changes it too early.
#define SIM_SOURCE(name, from, bytes, ...)                                                                       \
    UNWATCHED static sim::Source name##_reads(__VA_ARGS__) {                                                     \
        return {reinterpret_cast<uintptr_t>(from), size_t(bytes)};                                               \
    }                                                                                                            \
    SIM_EXPORT UNWATCHED void sim_source_##name(const void *args, uintptr_t *at, uint64_t *size) {               \
        const sim::Source source = decltype(sim::packed(name))::ask<name##_reads>(args);                         \
        *at = source.at;                                                                                         \
        *size = source.size;                                                                                     \
    }

// --- what port.cuh gives -----------------------------------------------------------------------------------------------

#define KVS_UNROLL
#define KVS_UNROLL_BY(count)

struct Four {
    float at[4];
};
struct Eight {
    float at[8];
};
struct Pair {
    unsigned at[2];
};
struct Quad {
    unsigned at[4];
};
struct Two {
    float at[2];
};

static __forceinline__ float float_of_bits(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
static __forceinline__ unsigned bits_of_float(float value) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
// Both are exact to the bit with and without F16C: the compiler's own conversion does the same in software.
static __forceinline__ float float_of_half(unsigned short bits) {
    _Float16 half;
    __builtin_memcpy(&half, &bits, 2);
    return float(half);
}
static __forceinline__ unsigned short half_of_float(float value) {
    const _Float16 half = _Float16(value);
    unsigned short bits;
    __builtin_memcpy(&bits, &half, 2);
    return bits;
}

static __forceinline__ Four load_four(const void *from) {
    const float *at = static_cast<const float *>(from);
    return {{at[0], at[1], at[2], at[3]}};
}
static __forceinline__ Eight load_eight(const float *from) {
    Eight got;
    for (int n = 0; n < 8; ++n) got.at[n] = from[n];
    return got;
}
static __forceinline__ Pair load_pair(const void *from) {
    const unsigned *at = static_cast<const unsigned *>(from);
    return {{at[0], at[1]}};
}
static __forceinline__ Two load_two(const float *from) { return {{from[0], from[1]}}; }
static __forceinline__ void store_two(float *to, float a, float b) {
    to[0] = a;
    to[1] = b;
}
static __forceinline__ void store_two(unsigned *to, unsigned a, unsigned b) {
    to[0] = a;
    to[1] = b;
}
static __forceinline__ unsigned pack_halves(float low, float high) {
    return half_of_float(low) | unsigned(half_of_float(high)) << 16;
}
static __forceinline__ void store_four(float *to, float a, float b, float c, float d) {
    to[0] = a;
    to[1] = b;
    to[2] = c;
    to[3] = d;
}

template <class T>
static __forceinline__ T *global_pointer(T *pointer) {
    return pointer;
}

static __forceinline__ int opaque(int value) { return value; }

static __forceinline__ void add_products(Eight (&acc)[4], const Eight &p, const Four &v) {
    for (int c = 0; c < 4; ++c)
        for (int m = 0; m < 8; ++m) {
            const float more = __builtin_fmaf(p.at[m], v.at[c], acc[c].at[m]);
            acc[c].at[m] = p.at[m] != 0.0f ? more : acc[c].at[m];
        }
}

// Macros, so that the line of the caller tells two meeting points apart.
#define __syncthreads() sim::block_wait(__LINE__)
#define block_sync() sim::block_wait(__LINE__)
#define warp_sync() sim::meet_sync(__LINE__)
#define __syncwarp() sim::meet_sync(__LINE__)
#define warp_max(value) sim::meet_one(sim::MEET_MAX, value, __LINE__)
#define warp_sum(value) sim::meet_one(sim::MEET_SUM, value, __LINE__)
#define quad_sum(sums) sim::meet(sim::MEET_QUAD, (sums).at, int(sizeof((sums).at) / sizeof(float)), __LINE__)
#define quad_max(value) sim::meet_one(sim::MEET_QUAD_MAX, value, __LINE__)
#define mma_16816(c, a, b) sim::meet_mma((c).at, (a).at, (b).at, __LINE__)
