// The nine KV types: how four adjacent values are read, and how 32 values are written. The arithmetic is that of
// kvstream/cuda/types.py, operation by operation: a product and a sum are two roundings here, never one fused.
#pragma once

#include "port.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;

enum Kind { KIND_F32, KIND_F16, KIND_BF16, KIND_Q8_0, KIND_Q5_1, KIND_Q5_0, KIND_Q4_1, KIND_Q4_0, KIND_IQ4_NL };

#define FOR_EACH_KIND(DO) \
    DO(KIND_F32) DO(KIND_F16) DO(KIND_BF16) DO(KIND_Q8_0) DO(KIND_Q5_1) DO(KIND_Q5_0) DO(KIND_Q4_1) DO(KIND_Q4_0) \
    DO(KIND_IQ4_NL)

static __device__ __forceinline__ int block_bytes(int kind) {  // of 32 values
    switch (kind) {
    case KIND_F32: return 128;
    case KIND_F16: case KIND_BF16: return 64;
    case KIND_Q8_0: return 34;
    case KIND_Q5_1: return 24;
    case KIND_Q5_0: return 22;
    case KIND_Q4_1: return 20;
    default: return 18;
    }
}

// Bytes of a row; plain rows need not be whole blocks.
static __device__ __forceinline__ int row_bytes(int kind, int values) { return values * block_bytes(kind) / 32; }

// The sixteen levels of iq4_nl: a byte of the word, as a float.
static __device__ __forceinline__ float level(int code) {
    const unsigned low = code & 4 ? 0xf6eaddcfu : 0xbfad9881u, high = code & 4 ? 0x71594535u : 0x26190d01u;
    return float(static_cast<signed char>((code & 8 ? high : low) >> (8 * (code & 3)) & 255u));
}

// A small integer as a float without a conversion unit: exact.
static __device__ __forceinline__ float small(unsigned code, float minus) {
    return float_of_bits(0x4b000000u | code) - (8388608.0f + minus);
}

static __device__ __forceinline__ unsigned half_at(const u8 *at) { return *reinterpret_cast<const u16 *>(at); }
static __device__ __forceinline__ unsigned word_at(const u8 *at) { return *reinterpret_cast<const unsigned *>(at); }
// Blocks of 34, 22 and 18 bytes leave nothing aligned to more than two.
static __device__ __forceinline__ unsigned word_of_halves(const u8 *at) { return half_at(at) | (half_at(at + 2) << 16); }

// Values x .. x + 3 of a row, x a multiple of four: never in two blocks, nor in two halves of one.
template <int KIND>
static __device__ __forceinline__ Four read_four(const u8 *row, int x, const float *levels) {
    Four got;
    if (KIND == KIND_F32) return load_four(row + 4 * x);
    if (KIND == KIND_F16 || KIND == KIND_BF16) {
        const Pair raw = load_pair(row + 2 * x);
        KVS_UNROLL
        for (int n = 0; n < 4; ++n) {
            const unsigned bits = raw.at[n >> 1] >> (16 * (n & 1)) & 0xffffu;
            got.at[n] = KIND == KIND_F16 ? float_of_half(u16(bits)) : float_of_bits(bits << 16);
        }
        return got;
    }
    const int within = x & 31;
    const u8 *block = row + (x >> 5) * (KIND == KIND_Q8_0 ? 34 : KIND == KIND_Q5_1 ? 24 : KIND == KIND_Q5_0 ? 22
                                        : KIND == KIND_Q4_1 ? 20 : 18);
    if (KIND == KIND_Q8_0) {
        const float d = float_of_half(u16(half_at(block)));
        const unsigned raw = word_of_halves(block + 2 + within) ^ 0x80808080u;
        KVS_UNROLL
        for (int n = 0; n < 4; ++n) got.at[n] = d * small(raw >> (8 * n) & 255u, 128.0f);
        return got;
    }
    const bool offset = KIND == KIND_Q5_1 || KIND == KIND_Q4_1;  // these have m, and blocks of a multiple of 4 bytes
    const bool fifth = KIND == KIND_Q5_1 || KIND == KIND_Q5_0;
    const unsigned head = offset ? word_at(block) : half_at(block);
    const float d = float_of_half(u16(head & 0xffffu));
    const u8 *codes = block + (offset ? 4 : 2) + (fifth ? 4 : 0) + (within & 15);
    const unsigned raw = (offset ? word_at(codes) : word_of_halves(codes)) >> (within & 16 ? 4 : 0);
    const unsigned high = fifth ? half_at(block + (offset ? 4 : 2) + (within >> 4) * 2) >> (within & 15) : 0u;
    KVS_UNROLL
    for (int n = 0; n < 4; ++n) {
        const unsigned code = (raw >> (8 * n) & 15u) | (fifth ? (high >> n & 1u) << 4 : 0u);
        if (KIND == KIND_IQ4_NL) {
            got.at[n] = d * levels[code];
        } else if (offset) {
            const float scaled = d * small(code, 0.0f);
            got.at[n] = scaled + float_of_half(u16(head >> 16));
        } else {
            got.at[n] = d * small(code, KIND == KIND_Q4_0 ? 8.0f : 16.0f);
        }
    }
    return got;
}

// --- encoding: one thread, one block ---------------------------------------------------------------------------------

static __device__ __forceinline__ float reciprocal(float scale) {
    const float inverse = 1.0f / scale;
    return fabsf(inverse) <= 3.4028234e38f ? inverse : 0.0f;
}

static __device__ __forceinline__ float extreme_of(const float *x) {  // the first of the largest magnitude
    float size = fabsf(x[0]), found = x[0];
    KVS_UNROLL
    for (int n = 1; n < 32; ++n) {
        const bool larger = fabsf(x[n]) > size;
        size = larger ? fabsf(x[n]) : size;
        found = larger ? x[n] : found;
    }
    return found;
}

static __device__ __forceinline__ unsigned cut(float code, int top) {  // towards zero, into 0 .. top; NaN is 0
    return !(code > 0.0f) ? 0u : code >= float(top) ? unsigned(top) : unsigned(int(code));
}

static __device__ __forceinline__ void put_half(u8 *at, unsigned value) {
    *reinterpret_cast<u16 *>(at) = u16(value);
}

static __device__ __forceinline__ void put_codes(u8 *at, const unsigned *codes) {  // j low, j + 16 high
    KVS_UNROLL
    for (int n = 0; n < 16; n += 2) {
        const unsigned first = (codes[n] & 15u) | (codes[n + 16] & 15u) << 4;
        const unsigned second = (codes[n + 1] & 15u) | (codes[n + 17] & 15u) << 4;
        put_half(at + n, first | second << 8);
    }
}

static __device__ __forceinline__ void encode_q8(u8 *to, const float *x) {
    const float d = fabsf(extreme_of(x)) / 127.0f, inverse = reciprocal(d);
    put_half(to, half_of_float(d));
    unsigned pair = 0;
    KVS_UNROLL
    for (int n = 0; n < 32; ++n) {
        const float step = x[n] * inverse, size = fabsf(step);
        float whole = floorf(size);
        if (size - whole >= 0.5f) whole += 1.0f;
        const int code = whole <= 127.0f ? int(whole) : 0;
        const unsigned byte = unsigned(step < 0.0f ? -code : code) & 255u;
        if (n & 1) put_half(to + 2 + n - 1, pair | byte << 8);
        pair = byte;
    }
}

template <int KIND>
static __device__ __forceinline__ void encode_codes(u8 *to, const float *x) {
    const bool offset = KIND == KIND_Q5_1 || KIND == KIND_Q4_1, fifth = KIND == KIND_Q5_1 || KIND == KIND_Q5_0;
    const int top = fifth ? 31 : 15, half = (top + 1) / 2;
    unsigned codes[32];
    float lowest = x[0], highest = x[0], d;
    if (offset) {
        KVS_UNROLL
        for (int n = 1; n < 32; ++n) {
            lowest = x[n] < lowest ? x[n] : lowest;
            highest = x[n] > highest ? x[n] : highest;
        }
        d = (highest - lowest) / float(top);
    } else {
        d = extreme_of(x) / float(-half);
    }
    const float inverse = reciprocal(d);
    unsigned high = 0;
    KVS_UNROLL
    for (int n = 0; n < 32; ++n) {
        const float step = (offset ? x[n] - lowest : x[n]) * inverse;
        codes[n] = cut(step + (offset ? 0.5f : float(half) + 0.5f), top);
        high |= (codes[n] >> 4) << n;
    }
    put_half(to, half_of_float(d));
    to += 2;
    if (offset) {
        put_half(to, half_of_float(lowest));
        to += 2;
    }
    if (fifth) {
        put_half(to, high & 0xffffu);
        put_half(to + 2, high >> 16);
        to += 4;
    }
    put_codes(to, codes);
}

static __device__ __forceinline__ void encode_levels(u8 *to, const float *x) {
    const float extreme = extreme_of(x), inverse = reciprocal(extreme / -127.0f);
    unsigned codes[32];
    float above = 0.0f, below = 0.0f;
    KVS_UNROLL
    for (int n = 0; n < 32; ++n) {
        const float step = x[n] * inverse;
        unsigned code = 0;  // how many borders between levels are at or below the step
        KVS_UNROLL
        for (int border = 0; border < 15; ++border)
            code += step >= 0.5f * (level(border) + level(border + 1)) ? 1u : 0u;
        codes[n] = code;
        const float value = level(int(code)), weighted = x[n] * x[n] * value;
        above = above + weighted * x[n];
        below = below + weighted * value;
    }
    const bool nothing = fabsf(extreme) < 1e-15f;  // the fit would be 0 / 0
    KVS_UNROLL
    for (int n = 0; n < 32; ++n) codes[n] = nothing ? 0u : codes[n];
    put_half(to, nothing ? 0u : half_of_float(above / below));
    put_codes(to + 2, codes);
}

// `count` values (32, or fewer at the end of a plain row) of a row.
template <int KIND>
static __device__ __forceinline__ void encode(u8 *to, const float *from, int count) {
    if (KIND == KIND_F32) {
        for (int n = 0; n < count; ++n) reinterpret_cast<float *>(to)[n] = from[n];
    } else if (KIND == KIND_F16) {
        for (int n = 0; n < count; ++n) put_half(to + 2 * n, half_of_float(from[n]));
    } else if (KIND == KIND_BF16) {
        for (int n = 0; n < count; ++n) {
            const unsigned bits = bits_of_float(from[n]), odd = bits >> 16 & 1u;
            const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;  // rounding could make an infinity of it
            put_half(to + 2 * n, nan ? (bits >> 16 | 0x40u) : (bits + 0x7fffu + odd) >> 16);
        }
    } else {
        float x[32];
        KVS_UNROLL
        for (int n = 0; n < 32; ++n) x[n] = from[n];
        if (KIND == KIND_Q8_0) encode_q8(to, x);
        else if (KIND == KIND_IQ4_NL) encode_levels(to, x);
        else encode_codes<KIND>(to, x);
    }
}
