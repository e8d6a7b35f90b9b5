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
struct Quad {
    unsigned at[4];
};
struct Two {
    float at[2];
};

static __device__ __forceinline__ float float_of_bits(unsigned bits) { return __uint_as_float(bits); }
static __device__ __forceinline__ unsigned bits_of_float(float value) { return __float_as_uint(value); }
static __device__ __forceinline__ float float_of_half(unsigned short bits) {
    return __half2float(__ushort_as_half(bits));
}
static __device__ __forceinline__ unsigned short half_of_float(float value) {
    return __half_as_ushort(__float2half_rn(value));
}

// Wide loads and stores: the address must be a multiple of 16 (four, eight) or 8 (pair, two).
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
static __device__ __forceinline__ Two load_two(const float *from) {
    const float2 got = *reinterpret_cast<const float2 *>(from);
    return {{got.x, got.y}};
}
static __device__ __forceinline__ void store_two(float *to, float a, float b) {
    *reinterpret_cast<float2 *>(to) = make_float2(a, b);
}
static __device__ __forceinline__ void store_two(unsigned *to, unsigned a, unsigned b) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(a, b);
}
static __device__ __forceinline__ void store_four(float *to, float a, float b, float c, float d) {
    *reinterpret_cast<float4 *>(to) = make_float4(a, b, c, d);
}

// Two values as f16 in one word, the first in the lower bits.
static __device__ __forceinline__ unsigned pack_halves(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned *>(&both);
}

// Addresses that come out of a table: without this the compiler must take them for any kind of memory.
template <class T>
static __device__ __forceinline__ T *global_pointer(T *pointer) {
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

// A value that the compiler knows nothing of. What is computed from it stays where it is written: computed ahead of a loop
// once for all its turns, and for each of nine types, it would take more registers than there are.
static __device__ __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
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
// Several sums at once, each over the four adjacent lanes 4i .. 4i + 3: (0 + 1) + (2 + 3).
template <class Sums>
static __device__ __forceinline__ void quad_sum(Sums &sums) {
#pragma unroll
    for (int apart = 1; apart <= 2; apart <<= 1) {
#pragma unroll
        for (int n = 0; n < int(sizeof(sums.at) / sizeof(float)); ++n)
            sums.at[n] += __shfl_xor_sync(0xffffffffu, sums.at[n], apart);
    }
}
static __device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// c += a b, 16 x 16 times 16 x 8, by the whole warp: f16 products, f32 sums. Which lane holds what: wide.cuh. Turing has
// only the half of it, 16 x 8 times 8 x 8, whose fragments are the first and the second half of these.
static __device__ __forceinline__ void mma_16816(Four &c, const Quad &a, const Pair &b) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c.at[0]), "+f"(c.at[1]), "+f"(c.at[2]), "+f"(c.at[3])
                 : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[0]), "r"(b.at[1]));
#else
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(c.at[0]), "+f"(c.at[1]), "+f"(c.at[2]), "+f"(c.at[3])
                     : "r"(a.at[2 * half]), "r"(a.at[2 * half + 1]), "r"(b.at[half]));
#endif
}

#endif
