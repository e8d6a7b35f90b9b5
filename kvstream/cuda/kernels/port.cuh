// What the kernels need from their compiler, for nvcc. The simulated driver's host header (tests/cuda/driver/kernel_host.h,
// force-included, defines KVS_SIM) gives the same names to g++. Nothing else differs between the two builds.
#pragma once

#ifndef KVS_SIM

#include <cuda_fp16.h>
#include <math_constants.h>

#define SIM_KERNEL(name)
#define SIM_SOURCE(name, from, bytes, ...)  // the host memory that a launch reads, told to the simulated driver
#define SHARED(T, name, count) __shared__ T name[count]
#define DYN_SHARED(T, name)                            \
    extern __shared__ __align__(16) char name##_raw[]; \
    T *const name = reinterpret_cast<T *>(name##_raw)
#define KVS_UNROLL _Pragma("unroll")
#define KVS_UNROLL_BY(count) _Pragma(KVS_TEXT(unroll count))
#define KVS_TEXT(text) #text

struct Four {
    float at[4];
};
struct Eight {
    float at[8];
};
struct Pair {
    unsigned at[2];
};

static __device__ __forceinline__ float float_of_bits(unsigned bits) { return __uint_as_float(bits); }
static __device__ __forceinline__ unsigned bits_of_float(float value) { return __float_as_uint(value); }
static __device__ __forceinline__ float float_of_half(unsigned short bits) {
    return __half2float(__ushort_as_half(bits));
}
static __device__ __forceinline__ unsigned short half_of_float(float value) {
    return __half_as_ushort(__float2half_rn(value));
}

// Wide loads and stores: the address must be a multiple of 16 (four, eight) or 8 (pair).
static __device__ __forceinline__ Four load_four(const void *from) {
    const float4 got = *static_cast<const float4 *>(from);
    return {{got.x, got.y, got.z, got.w}};
}
static __device__ __forceinline__ Eight load_eight(const float *from) {
    const float4 low = reinterpret_cast<const float4 *>(from)[0], high = reinterpret_cast<const float4 *>(from)[1];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}
static __device__ __forceinline__ Pair load_pair(const void *from) {
    const uint2 got = *static_cast<const uint2 *>(from);
    return {{got.x, got.y}};
}
static __device__ __forceinline__ void store_four(float *to, float a, float b, float c, float d) {
    *reinterpret_cast<float4 *>(to) = make_float4(a, b, c, d);
}

// Addresses that come out of a table: without this the compiler must take them for any kind of memory.
template <class T>
static __device__ __forceinline__ T *global_pointer(T *pointer) {
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

// acc[c][m] += p[m] v[c], fused, except where p is 0: there it stays as it is, whatever v may be.
static __device__ __forceinline__ void add_products(Eight (&acc)[4], const Eight &p, const Four &v) {
#pragma unroll
    for (int m = 0; m < 8; ++m) {
        if (p.at[m] != 0.0f) {
#pragma unroll
            for (int c = 0; c < 4; ++c) acc[c].at[m] = fmaf(p.at[m], v.at[c], acc[c].at[m]);
        }
    }
}

// Every thread of the block, or of the warp, must arrive. A reduction is a butterfly: every lane gets the same bits.
// It orders no memory.
static __device__ __forceinline__ void block_sync() { __syncthreads(); }
static __device__ __forceinline__ void warp_sync() { __syncwarp(); }
static __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int apart = 16; apart > 0; apart >>= 1) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, apart));
    return value;
}
static __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int apart = 16; apart > 0; apart >>= 1) value += __shfl_xor_sync(0xffffffffu, value, apart);
    return value;
}
// Eight sums at once, each over the four adjacent lanes 4i .. 4i + 3: (0 + 1) + (2 + 3).
static __device__ __forceinline__ void quad_sum(Eight &sums) {
#pragma unroll
    for (int apart = 1; apart <= 2; apart <<= 1) {
#pragma unroll
        for (int n = 0; n < 8; ++n) sums.at[n] += __shfl_xor_sync(0xffffffffu, sums.at[n], apart);
    }
}

#endif
