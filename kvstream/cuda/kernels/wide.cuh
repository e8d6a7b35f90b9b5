// Attention of wide steps (prefill) on tensor cores: the running form of attend.cuh with f16 products and f32 sums.
// README.md in this folder says what is passed and what is computed, and how far its values are from attend's.
//
// A block takes one kv head and 64 vectors, 16 to a warp, and goes over the pages in order, a *strip* of 32 tokens at
// a time. The block decodes a strip of K and V into shared memory as f16; then every warp for itself: scores by mma,
// softmax in registers with a running maximum, and the sum over V by mma. Queries and sums stay in registers
// throughout. Strips are counted from the beginning of their page and at the end of a page the state is brought into
// the form in which it is stored, so a vector's bits do not depend on where waves are cut, nor on where pages lie.
//
// The fragments of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"), for a lane
// with g = lane / 4 and t = lane % 4, each register two halves with the lower index in the lower bits:
//
//     A, 16 x 16   a0: row g      k 2t, 2t+1      a1: row g + 8  k 2t, 2t+1
//                  a2: row g      k 2t+8, 2t+9    a3: row g + 8  k 2t+8, 2t+9
//     B, 16 x 8    b0: k 2t, 2t+1      column g   b1: k 2t+8, 2t+9  column g
//     C, 16 x 8    c0, c1: row g      columns 2t, 2t+1      c2, c3: row g + 8  columns 2t, 2t+1
//
// A sum over k does not mind its order, so k may stand for anything as long as A and B agree:
// * Scores: A is q, rows are vectors; B is K, columns are tokens. k = 2t, 2t+1, 2t+8, 2t+9 stand for the dims 4t ..
//   4t+3 of sixteen, so that a lane's b0 and b1 lie together, as they were decoded.
// * Sum over V: A is p, rows are vectors; B is V, columns are dims, and k is the token. The C of two blocks of eight
//   tokens are the A of sixteen. V is kept so that a lane's b0 and b1 lie together: for each quad of tokens 2t, 2t+1,
//   2t+8, 2t+9 and each dim one pair of words.
#pragma once

#include "attend.cuh"

constexpr int WIDE_WARPS = 4, WIDE_THREADS = 32 * WIDE_WARPS;
constexpr int WIDE_VECTORS = 16 * WIDE_WARPS;
constexpr float HALF_MAX = 65504.0f;

// `wide_shared_bytes` in __init__.py counts the same. Rows of words are as long as keeps the lanes' banks apart.
template <int D>
struct Strip {
    static constexpr int TOKENS = D == 256 ? 16 : 32;
    static constexpr int KEY_WORDS = D / 2 + (D / 2 % 16 == 8 ? 0 : 8);  // of one token
    static constexpr int VALUE_WORDS = 2 * D + 8;                        // of four tokens
    static constexpr int BLOCKS = D >= 128 ? 2 : 3;                      // wanted on one multiprocessor
    unsigned *keys, *values;
    float *levels;  // 16: iq4_nl
    float *most;    // [warps]: the largest magnitude decoded
    float *by;      // [vectors]: what scores are multiplied with
    int *position;  // [vectors], -1: there is no such vector

    __device__ __forceinline__ Strip(float *memory) {
        keys = reinterpret_cast<unsigned *>(memory);
        values = keys + TOKENS * KEY_WORDS;
        levels = reinterpret_cast<float *>(values + TOKENS / 4 * VALUE_WORDS);
        most = levels + 16;
        by = most + WIDE_WARPS;
        position = reinterpret_cast<int *>(by + WIDE_VECTORS);
    }
};

// 2^(x + EXTRA) for x <= 0, to 4 of 10^6. Below 2^-100 it is 0; NaN stays NaN; of 0 it is exact.
template <int EXTRA>
static __device__ __forceinline__ float power_of_two(float x) {
    const float shifted = x + 12582912.0f;  // round(x) in the low bits
    const float r = x - (shifted - 12582912.0f);
    float sum = fmaf(r, 1.33335581e-3f, 9.61812911e-3f);
    sum = fmaf(r, sum, 5.55041087e-2f);
    sum = fmaf(r, sum, 2.40226507e-1f);
    sum = fmaf(r, sum, 6.93147181e-1f);
    sum = fmaf(r, sum, 1.0f);
    const float power = float_of_bits((bits_of_float(shifted) - 0x4b400000u + 127u + EXTRA) << 23);
    return x < -100.0f ? 0.0f : sum * power;
}

static __device__ __forceinline__ float exact_power(int exponent) {  // -126 .. 127
    return float_of_bits(unsigned(127 + exponent) << 23);
}

static __device__ __forceinline__ float most_of(float most, const Four &x) {
    return fmaxf(fmaxf(fmaxf(most, fabsf(x.at[0])), fmaxf(fabsf(x.at[1]), fabsf(x.at[2]))), fabsf(x.at[3]));
}

// Which part of a strip a thread decodes: always the same four dims, of every PER-th token (or quad of tokens).
template <int D>
struct Share {
    static constexpr int PER = WIDE_THREADS / (D / 4);
    int d, first;  // `first` is beyond the strip for the few threads that are too many
    __device__ __forceinline__ Share(int thread) {
        first = thread / (D / 4);
        d = 4 * (thread - first * (D / 4));
        if (first >= PER) first = Strip<D>::TOKENS;
    }
};

// Tokens of a page from `first` on, as many as a strip has, those from `end` on as zeros. All times `down`.
template <int D, int KIND>
static __device__ __forceinline__ float fill_keys(const Strip<D> &strip, const u8 *page, int bytes, int x, int first,
                                                  int end, float down, const Share<D> &share) {
    float most = 0.0f;
    const u8 *row = page + size_t(first + share.first) * bytes;
    unsigned *to = strip.keys + share.first * Strip<D>::KEY_WORDS + share.d / 2;
    KVS_UNROLL_BY((D < 256 ? 2 : 1))
    for (int token = share.first; token < Strip<D>::TOKENS; token += Share<D>::PER) {
        Four k = {};
        if (first + token < end) k = read_four<KIND>(row, x + share.d, strip.levels);
        most = most_of(most, k);
        store_two(to, pack_halves(k.at[0] * down, k.at[1] * down), pack_halves(k.at[2] * down, k.at[3] * down));
        row += Share<D>::PER * bytes;
        to += Share<D>::PER * Strip<D>::KEY_WORDS;
    }
    return most;
}

template <int D, int KIND>
static __device__ __forceinline__ float fill_values(const Strip<D> &strip, const u8 *page, int bytes, int x, int first,
                                                    int end, float down, const Share<D> &share) {
    float most = 0.0f;
    KVS_UNROLL_BY(1)
    for (int quad = share.first; quad < Strip<D>::TOKENS / 4; quad += Share<D>::PER) {
        const int token = first + 16 * (quad >> 2) + 2 * (quad & 3);
        const u8 *row = page + size_t(token) * bytes;
        unsigned words[2][4];
        KVS_UNROLL
        for (int pair = 0; pair < 2; ++pair) {
            Four v[2] = {};
            KVS_UNROLL
            for (int c = 0; c < 2; ++c) {
                const int at = c + 8 * pair;
                if (token + at < end) v[c] = read_four<KIND>(row + at * bytes, x + share.d, strip.levels);
                most = most_of(most, v[c]);
            }
            KVS_UNROLL
            for (int c = 0; c < 4; ++c) words[pair][c] = pack_halves(v[0].at[c] * down, v[1].at[c] * down);
        }
        unsigned *to = strip.values + quad * Strip<D>::VALUE_WORDS + 2 * share.d;
        KVS_UNROLL
        for (int c = 0; c < 4; ++c) store_two(to + 2 * c, words[0][c], words[1][c]);
    }
    return most;
}

// Decodes a strip for the whole block. What f16 cannot hold (never seen in practice) is halved as often as is needed;
// the factor is returned.
template <int D>
static __device__ __forceinline__ float fill(const Strip<D> &strip, const AttendArgs &a, const u8 *k, const u8 *v,
                                             int k_bytes, int v_bytes, int x, int first, int end) {
    float down = 1.0f;
    for (;;) {
        block_sync();  // the strip before has been read, and its maxima
        const Share<D> share(opaque(int(threadIdx.x)));
        float most = 0.0f;
#define KEYS(KIND) case KIND: most = fill_keys<D, KIND>(strip, k, k_bytes, x, first, end, down, share); break;
#define ALL_VALUES(KIND) \
    case KIND: most = fmaxf(most, fill_values<D, KIND>(strip, v, v_bytes, x, first, end, down, share)); break;
        switch (a.k_type) { FOR_EACH_KIND(KEYS) }
        switch (a.v_type) { FOR_EACH_KIND(ALL_VALUES) }
        most = warp_max(most);
        if ((threadIdx.x & 31) == 0) strip.most[threadIdx.x >> 5] = most;
        block_sync();
        const Four each = load_four(strip.most);
        most = fmaxf(fmaxf(each.at[0], each.at[1]), fmaxf(each.at[2], each.at[3]));
        if (most <= HALF_MAX || down != 1.0f) break;
        down = exact_power(141 - int(bits_of_float(most) >> 23));  // the largest becomes 2^14 and something
    }
    return down;
}

// A lane's two vectors: rows g and g + 8 of its warp.
template <int D>
struct Lane {
    Quad q[D / 16];
    Four acc[D / 8];
    float top[2], sum[2];  // `sum` is this lane's share
};

// q as f16, of each vector with a power of two so that its largest value is 2^12 and something.
template <int D>
static __device__ __forceinline__ void take_queries(Lane<D> &lane, const Strip<D> &strip, const float *const (&q)[2], float scale) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    KVS_UNROLL
    for (int h = 0; h < 2; ++h) {
        float most = 0.0f;
        KVS_UNROLL
        for (int n = 0; n < D / 16; ++n)
            if (q[h]) most = most_of(most, load_four(q[h] + 16 * n + 4 * t));
        most = quad_max(most);
        const int field = int(bits_of_float(most) >> 23), exponent = (field < 13 ? 13 : field) - 139;
        const float down = exact_power(-exponent);
        // From here on in powers of two, not of e.
        if (t == 0) strip.by[16 * (threadIdx.x >> 5) + g + 8 * h] = scale * 1.44269504f * exact_power(exponent);
        KVS_UNROLL
        for (int n = 0; n < D / 16; ++n) {
            Four x = {};
            if (q[h]) x = load_four(q[h] + 16 * n + 4 * t);
            lane.q[n].at[h] = pack_halves(x.at[0] * down, x.at[1] * down);
            lane.q[n].at[h + 2] = pack_halves(x.at[2] * down, x.at[3] * down);
        }
    }
}

// The two vectors of a lane: which rows of q, state and output they are, counted in query heads, and at which position.
// -1: there is no such vector. Worked out twice rather than kept.
struct Own {
    int row[2], position[2];
    __device__ __forceinline__ Own(const AttendArgs &a, const int *tile, int thread) {
        KVS_UNROLL
        for (int h = 0; h < 2; ++h) {
            const int vector = tile[4] + 16 * (thread >> 5) + ((thread & 31) >> 2) + 8 * h, of = vector / a.group;
            const bool is = of < tile[3];
            const int head = int(blockIdx.y) * a.group + (vector - of * a.group);
            row[h] = is ? (tile[2] + of) * a.kv_heads * a.group + head : -1;
            position[h] = is ? a.positions[tile[2] + of] : -1;
        }
    }
};

// The state as attend.cuh keeps it: here `top` counts in powers of two, and `sum` and `acc` are 2^15 times as large.
template <int D>
static __device__ __forceinline__ void exchange_state(Lane<D> &lane, const AttendArgs &a, const Own &own, bool store) {
    const int t = threadIdx.x & 3;
    KVS_UNROLL
    for (int h = 0; h < 2; ++h) {
        if (own.row[h] < 0) continue;
        float *acc = a.acc + size_t(own.row[h]) * D + 2 * t, *ml = a.ml + 2 * size_t(own.row[h]);
        KVS_UNROLL
        for (int n = 0; n < D / 8; ++n) {
            if (store) {
                store_two(acc + 8 * n, lane.acc[n].at[2 * h], lane.acc[n].at[2 * h + 1]);
            } else {
                const Two got = load_two(acc + 8 * n);
                lane.acc[n].at[2 * h] = got.at[0];
                lane.acc[n].at[2 * h + 1] = got.at[1];
            }
        }
        if (store) {
            if (t == 0) store_two(ml, lane.top[h], lane.sum[h]);
        } else {
            lane.top[h] = ml[0];
            lane.sum[h] = t == 0 ? ml[1] : 0.0f;
        }
    }
}

// What rows at positions low .. high, the same or later ones, see of a page at `position`.
struct Seen {
    int from, to;        // anything: the first to the last that any of them sees
    int all_from, all_to;  // everything: seen by each of them
    __device__ __forceinline__ Seen(int low, int high, int position, int tokens, int window) {
        const int first = low - position, last = high - position;
        from = first < window ? 0 : first - window + 1;
        to = last < tokens ? last + 1 : tokens;
        all_from = last < window ? 0 : last - window + 1;
        all_to = first < tokens ? first + 1 : tokens;
    }
};

// One strip, for one warp; it begins at token `first` of the page. `whole`: all its vectors see all of it.
template <int D>
static __device__ __forceinline__ void attend_strip(Lane<D> &lane, const Strip<D> &strip, const AttendArgs &a,
                                                    const int *entry, int first, bool whole, float down) {
    const float up = float_of_bits(0x7f000000u - bits_of_float(down));  // 1 / down, which is a power of two
    constexpr int BLOCKS = Strip<D>::TOKENS / 8;
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    Four s[BLOCKS] = {};
    KVS_UNROLL
    for (int n = 0; n < D / 16; ++n)
        KVS_UNROLL
        for (int b = 0; b < BLOCKS; ++b) {
            const Pair k = load_pair(strip.keys + (8 * b + g) * Strip<D>::KEY_WORDS + 8 * n + 2 * t);
            mma_16816(s[b], lane.q[n], k);
        }
    float factor[2];
    KVS_UNROLL
    for (int h = 0; h < 2; ++h) {
        const int vector = 16 * (threadIdx.x >> 5) + g + 8 * h;
        const float by = strip.by[vector] * up;
        const Seen seen(strip.position[vector], strip.position[vector], entry[1], entry[2], a.window);
        float top = float_of_bits(0xff800000u);
        KVS_UNROLL
        for (int n = 0; n < 2 * BLOCKS; ++n) {
            float &score = s[n >> 1].at[2 * h + (n & 1)];
            const int token = first + 8 * (n >> 1) + 2 * t + (n & 1);
            score *= by;
            if (!whole && (token < seen.from || token >= seen.to)) score = float_of_bits(0xff800000u);
            top = fmaxf(top, score);
        }
        top = fmaxf(lane.top[h], quad_max(top));
        const float base = top == float_of_bits(0xff800000u) ? 0.0f : top;  // it has seen nothing so far
        factor[h] = power_of_two<0>(lane.top[h] - base);
        lane.top[h] = top;
        float sum = 0.0f;
        KVS_UNROLL
        for (int n = 0; n < 2 * BLOCKS; ++n) {
            float &p = s[n >> 1].at[2 * h + (n & 1)];
            p = power_of_two<15>(p - base);  // up to 2^15: a small p keeps its bits in f16
            sum += p;
        }
        lane.sum[h] = fmaf(lane.sum[h], factor[h], sum);
        factor[h] *= down;
    }
    if (factor[0] != 1.0f || factor[1] != 1.0f) {
        KVS_UNROLL
        for (int n = 0; n < D / 8; ++n)
            KVS_UNROLL
            for (int c = 0; c < 4; ++c) lane.acc[n].at[c] *= factor[c >> 1];
    }
    KVS_UNROLL
    for (int n = 0; n < BLOCKS / 2; ++n) {
        const Four &low = s[2 * n], &high = s[2 * n + 1];
        const Quad p = {{pack_halves(low.at[0], low.at[1]), pack_halves(low.at[2], low.at[3]),
                         pack_halves(high.at[0], high.at[1]), pack_halves(high.at[2], high.at[3])}};
        KVS_UNROLL
        for (int b = 0; b < D / 8; ++b) {
            const Pair v = load_pair(strip.values + (4 * n + t) * Strip<D>::VALUE_WORDS + 2 * (8 * b + g));
            mma_16816(lane.acc[b], p, v);
        }
    }
    if (up != 1.0f) {
        KVS_UNROLL
        for (int n = 0; n < D / 8; ++n)
            KVS_UNROLL
            for (int c = 0; c < 4; ++c) lane.acc[n].at[c] *= up;
    }
}

template <int D>
static __device__ __forceinline__ void attend_wide(const AttendArgs &a) {
    constexpr int TOKENS = Strip<D>::TOKENS;
    DYN_SHARED(float, memory);
    const Strip<D> strip(memory);
    const int thread = int(threadIdx.x), t = thread & 3;
    const int *tile = a.tiles + TILE_INTS * blockIdx.x;
    const int first_entry = tile[0], entries = tile[1], first_row = tile[2], flags = tile[5];
    const int first = tile[4], end = tile[3] * a.group < first + WIDE_VECTORS ? tile[3] * a.group : first + WIDE_VECTORS;
    if (first >= end) return;
    const int *positions = a.positions + first_row;
    const int low = positions[first / a.group], high = positions[(end - 1) / a.group];
    const int mine = first + 16 * (thread >> 5), mine_end = mine + 16 < end ? mine + 16 : end;  // this warp's
    const bool idle = mine >= end;
    const int my_low = positions[(idle ? first : mine) / a.group], my_high = idle ? my_low : positions[(mine_end - 1) / a.group];

    Lane<D> lane;
    {
        const Own own(a, tile, thread);
        const float *const q[2] = {own.row[0] < 0 ? nullptr : a.q + size_t(own.row[0]) * D,
                                   own.row[1] < 0 ? nullptr : a.q + size_t(own.row[1]) * D};
        KVS_UNROLL
        for (int h = 0; h < 2; ++h) {
            if (t == 0) strip.position[16 * (thread >> 5) + ((thread & 31) >> 2) + 8 * h] = own.position[h];
            lane.top[h] = float_of_bits(0xff800000u);
            lane.sum[h] = 0.0f;
        }
        take_queries(lane, strip, q, a.scale);
        KVS_UNROLL
        for (int n = 0; n < D / 8; ++n) lane.acc[n] = {};
        if (!(flags & TILE_BEGIN)) exchange_state(lane, a, own, false);
    }
    if (thread < 16) strip.levels[thread] = level(thread);
    block_sync();  // where nothing is seen no other follows, and a lane's neighbours have read the state that it stores

    const int x = int(blockIdx.y) * D, k_bytes = row_bytes(a.k_type, a.kv_heads * D);
    const int v_bytes = row_bytes(a.v_type, a.kv_heads * D);
    for (int n = 0; n < entries; ++n) {
        const int *entry = a.entries + ENTRY_INTS * (first_entry + n);
        const int position = entry[1], tokens = entry[2];
        const Seen block(low, high, position, tokens, a.window), warp(my_low, my_high, position, tokens, a.window);
        if (block.from >= block.to) continue;
        const u8 *k = global_pointer(reinterpret_cast<const u8 *>(a.k_pages[entry[0]]));
        const u8 *v = global_pointer(reinterpret_cast<const u8 *>(a.v_pages[entry[0]]));
        for (int at = block.from / TOKENS * TOKENS; at < block.to; at += TOKENS) {
            const float down = fill(strip, a, k, v, k_bytes, v_bytes, x, at, block.to);
            if (idle || at >= warp.to || at + TOKENS <= warp.from) continue;
            attend_strip(lane, strip, a, entry, at, at >= warp.all_from && at + TOKENS <= warp.all_to, down);
        }
        // The lanes' shares of the sum become one, which the first lane of four goes on with, as if it had been loaded.
        Two sums = {{lane.sum[0], lane.sum[1]}};
        quad_sum(sums);
        KVS_UNROLL
        for (int h = 0; h < 2; ++h) lane.sum[h] = t == 0 ? sums.at[h] : 0.0f;
    }
    const Own own(a, tile, opaque(thread));
    if (!(flags & TILE_END)) return exchange_state(lane, a, own, true);
    Two sums = {{lane.sum[0], lane.sum[1]}};  // of four lanes, all but one have 0
    quad_sum(sums);
    KVS_UNROLL
    for (int h = 0; h < 2; ++h) {
        if (own.row[h] < 0) continue;
        const float one = sums.at[h] != 0.0f ? 1.0f / sums.at[h] : 0.0f;
        KVS_UNROLL
        for (int n = 0; n < D / 8; ++n)  // adding 0 makes 0 of -0, which acc is or not depending on what was skipped
            store_two(a.out + size_t(own.row[h]) * D + 8 * n + 2 * t, lane.acc[n].at[2 * h] * one + 0.0f,
                      lane.acc[n].at[2 * h + 1] * one + 0.0f);
    }
}
