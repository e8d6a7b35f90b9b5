// Attention over pages. README.md in this folder says what is passed and what is computed, and in which order.
//
// A block takes one kv head and up to eight *vectors* (query heads of that kv head, of one or several rows), so that a
// value of K or V is decoded once for all of them. Page by page: scores from K into shared memory (four lanes to a token),
// softmax within the page (one warp to a vector), then the sum over V (four dims to a thread, tokens dealt to SPLITS
// groups of threads). What a vector gets depends on nothing that the other vectors of the block do: each has its own
// accumulators, and what it may not see has p = 0, which is skipped rather than multiplied. That is why a row's bits
// do not depend on how many rows travel with it.
#pragma once

#include "kinds.cuh"

constexpr int VECTORS = 8;
constexpr int ENTRY_INTS = 8, TILE_INTS = 8, FOLD_INTS = 4;
constexpr int TILE_BEGIN = 1, TILE_END = 2;

template <int D>
struct Shape {
    static constexpr int QUARTERS = D / 4;              // threads that cover a row of V, four dims each
    static constexpr int SPLITS = D == 256 ? 4 : 8;     // groups that the tokens are dealt to
    static constexpr int THREADS = QUARTERS * SPLITS;   // a multiple of 32, and not fewer than D
    static constexpr int WARPS = THREADS / 32;
};

// What the block keeps in dynamic shared memory, in floats. `attend_shared_bytes` in __init__.py counts the same.
template <int D>
struct Desk {
    float *q;       // [D][8], with eight floats of room after every four dims (see q_at)
    float *scores;  // [page_tokens][8]: scores, then p
    float *parts;   // two times [SPLITS][D]
    float *levels;  // 16: iq4_nl
    float *page;    // [8][2]: maximum and sum of this page
    int *seen;      // two times [8][2]: first token seen, first not seen any more
    // running form only
    float *acc;     // [8][D]
    float *state;   // [8][2]: maximum and sum so far
    float *factors; // [8][2]: what the old and the new accumulator are multiplied with

    __device__ __forceinline__ Desk(float *memory, int page_tokens) {
        q = memory;
        scores = q + 10 * D;
        parts = scores + VECTORS * page_tokens;
        levels = parts + 2 * Shape<D>::SPLITS * D;
        page = levels + 16;
        seen = reinterpret_cast<int *>(page + 16);
        acc = page + 48;
        state = acc + VECTORS * D;
        factors = state + 16;
    }
};

// Four lanes of a warp read dims that are four apart: the gap puts them into different banks.
static __device__ __forceinline__ int q_at(int d) { return 8 * (d + (d >> 2)); }

// e^x for x <= 0, the same bits on every machine: powers of two by the exponent field, the rest by a polynomial.
// Below the smallest normal number it is 0; NaN stays NaN; exponential(0) is exactly 1.
static __device__ __forceinline__ float exponential(float x) {
    const float shifted = fmaf(x, 1.44269504f, 12582912.0f);  // round(x / ln 2) in the low bits
    const float n = shifted - 12582912.0f;
    const float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x));  // ln 2 in two parts
    float sum = fmaf(r, 1.98412698e-4f, 1.38888889e-3f);
    sum = fmaf(r, sum, 8.33333333e-3f);
    sum = fmaf(r, sum, 4.16666667e-2f);
    sum = fmaf(r, sum, 1.66666667e-1f);
    sum = fmaf(r, sum, 0.5f);
    sum = fmaf(r, sum, 1.0f);
    sum = fmaf(r, sum, 1.0f);
    const float power = float_of_bits((bits_of_float(shifted) - 0x4b400000u + 127u) << 23);
    return x < -87.0f ? 0.0f : sum * power;
}

// The fold, one step: in both forms.
struct Factors {
    float top, old, add;
};
static __device__ __forceinline__ Factors fold_factors(float top, float page_top) {
    const float larger = page_top > top ? page_top : top;
    return {larger, exponential(top - larger), exponential(page_top - larger)};
}
static __device__ __forceinline__ float fold(const Factors &by, float old, float add) {
    return fmaf(add, by.add, old * by.old);
}

// Scores of the tokens first .. end - 1 (first a multiple of eight) for the eight vectors.
template <int D, int KIND>
static __device__ __forceinline__ void scores_of(const Desk<D> &desk, const u8 *page, int bytes, int x, int first,
                                                 int end, float scale) {
    const int lane = threadIdx.x & 31, part = lane & 3;
    for (int base = first + int(threadIdx.x >> 5) * 8; base < end; base += Shape<D>::WARPS * 8) {
        const int token = base + (lane >> 2);
        Eight dot = {};
        if (token < end) {
            const u8 *row = page + size_t(token) * bytes;
            KVS_UNROLL_BY(2)
            for (int d = 4 * part; d < D; d += 16) {
                const Four k = read_four<KIND>(row, x + d, desk.levels);
                KVS_UNROLL
                for (int c = 0; c < 4; ++c) {
                    const Eight q = load_eight(desk.q + q_at(d) + 8 * c);
                    KVS_UNROLL
                    for (int m = 0; m < VECTORS; ++m) dot.at[m] = fmaf(k.at[c], q.at[m], dot.at[m]);
                }
            }
        }
        quad_sum(dot);
        if (part == 0 && token < end) {
            float *to = desk.scores + VECTORS * token;
            store_four(to, scale * dot.at[0], scale * dot.at[1], scale * dot.at[2], scale * dot.at[3]);
            store_four(to + 4, scale * dot.at[4], scale * dot.at[5], scale * dot.at[6], scale * dot.at[7]);
        }
    }
}

// Scores become p; maximum and sum of the page are left in desk.page, and in the running form the state is folded.
template <int D>
static __device__ __forceinline__ void softmax_of(const Desk<D> &desk, const int *seen, int vectors, int first, int end,
                                                  bool running) {
    const int lane = threadIdx.x & 31;
    for (int m = int(threadIdx.x >> 5); m < vectors; m += Shape<D>::WARPS) {
        const int from = seen[2 * m], to = seen[2 * m + 1];
        float top = float_of_bits(0xff800000u);
        for (int token = (first & ~31) + lane; token < end; token += 32)
            if (token >= from && token < to) top = fmaxf(top, desk.scores[VECTORS * token + m]);
        top = warp_max(top);
        float sum = 0.0f;
        for (int token = (first & ~31) + lane; token < end; token += 32) {
            if (token < first) continue;
            float *at = desk.scores + VECTORS * token + m;
            const float p = token >= from && token < to ? exponential(*at - top) : 0.0f;
            *at = p;
            sum += p;
        }
        sum = warp_sum(sum);
        if (lane != 0) continue;
        desk.page[2 * m] = top;
        desk.page[2 * m + 1] = sum;
        if (running && sum != 0.0f) {
            const Factors by = fold_factors(desk.state[2 * m], top);
            desk.state[2 * m] = by.top;
            desk.state[2 * m + 1] = fold(by, desk.state[2 * m + 1], sum);
            desk.factors[2 * m] = by.old;
            desk.factors[2 * m + 1] = by.add;
        }
    }
}

template <int D, int KIND>
static __device__ __forceinline__ void values_of(const Desk<D> &desk, const u8 *page, int bytes, int x, int first,
                                                 int end, Eight (&acc)[4]) {
    const int split = int(threadIdx.x) / Shape<D>::QUARTERS;
    x += 4 * (int(threadIdx.x) - split * Shape<D>::QUARTERS);
    KVS_UNROLL_BY(2)
    for (int token = first + split; token < end; token += Shape<D>::SPLITS) {
        const Four v = read_four<KIND>(page + size_t(token) * bytes, x, desk.levels);
        const Eight p = load_eight(desk.scores + VECTORS * token);
        add_products(acc, p, v);
    }
}

template <int D>
static __device__ __forceinline__ float sum_of_parts(const float *parts, int d) {
    float sum = (parts[d] + parts[D + d]) + (parts[2 * D + d] + parts[3 * D + d]);
    if (Shape<D>::SPLITS == 8)
        sum += (parts[4 * D + d] + parts[5 * D + d]) + (parts[6 * D + d] + parts[7 * D + d]);
    return sum;
}

struct AttendArgs {
    const float *q;
    const u64 *k_pages, *v_pages;
    const int *entries, *positions, *tiles;
    float *acc, *ml, *out;
    float scale;
    int kv_heads, group, page_tokens, k_type, v_type, window;
};

// Which vectors this block has: index m is row `row_of(m)` of the step and query head `head_of(m)`.
struct Vectors {
    int first, count, first_row, group, head;
    __device__ __forceinline__ int row_of(int m) const { return (first + m) / group; }  // counted from first_row
    __device__ __forceinline__ int head_of(int m) const { return head + (first + m) % group; }
};

template <int D>
static __device__ __forceinline__ void attend(const AttendArgs &a) {
    DYN_SHARED(float, memory);
    const Desk<D> desk(memory, a.page_tokens);
    const bool running = a.tiles != nullptr;
    const int thread = int(threadIdx.x), q_heads = a.kv_heads * a.group;
    const int *tile = running ? a.tiles + TILE_INTS * blockIdx.x : nullptr;
    const int first_entry = running ? tile[0] : int(blockIdx.x), entries = running ? tile[1] : 1;
    const int flags = running ? tile[5] : 0;
    const int *rows_of = running ? tile + 2 : a.entries + ENTRY_INTS * first_entry + 3;
    Vectors mine = {running ? tile[4] : int(blockIdx.z) * VECTORS, 0, rows_of[0], a.group, int(blockIdx.y) * a.group};
    mine.count = rows_of[1] * a.group - mine.first;
    mine.count = mine.count < VECTORS ? mine.count : VECTORS;
    if (mine.count <= 0) return;

    for (int n = thread; n < VECTORS * D; n += Shape<D>::THREADS) {
        const int m = n / D, d = n - m * D;
        const size_t row = size_t(mine.first_row + mine.row_of(m)) * q_heads + mine.head_of(m);
        desk.q[q_at(d) + m] = m < mine.count ? a.q[row * D + d] : 0.0f;
    }
    if (thread < 16) desk.levels[thread] = level(thread);
    if (running) {
        const bool begin = (flags & TILE_BEGIN) != 0;
        for (int m = 0; m < mine.count; ++m) {
            const size_t row = size_t(mine.first_row + mine.row_of(m)) * q_heads + mine.head_of(m);
            if (thread < D) desk.acc[m * D + thread] = begin ? 0.0f : a.acc[row * D + thread];
            if (thread < 2) {
                const float nothing = thread == 0 ? float_of_bits(0xff800000u) : 0.0f;
                desk.state[2 * m + thread] = begin ? nothing : a.ml[2 * row + thread];
            }
        }
    }

    const int x = int(blockIdx.y) * D, k_bytes = row_bytes(a.k_type, a.kv_heads * D);
    const int v_bytes = row_bytes(a.v_type, a.kv_heads * D);
    int turn = 0;
    for (int n = 0; n < entries; ++n) {
        const int *entry = a.entries + ENTRY_INTS * (first_entry + n);
        const int position = entry[1], tokens = entry[2];
        int *seen = desk.seen + 16 * (n & 1);  // two of them: somebody may still be reading that of the last page
        if (thread < mine.count) {
            const int row = a.positions[mine.first_row + mine.row_of(thread)] - position;  // within the page
            const int oldest = row < a.window ? 0 : row - a.window + 1;
            seen[2 * thread] = oldest;
            seen[2 * thread + 1] = row < tokens ? row + 1 : tokens;
        }
        block_sync();
        int first = tokens, end = 0;
        for (int m = 0; m < mine.count; ++m)
            if (seen[2 * m] < seen[2 * m + 1]) {
                first = seen[2 * m] < first ? seen[2 * m] : first;
                end = seen[2 * m + 1] > end ? seen[2 * m + 1] : end;
            }
        first &= ~7;
        Eight sums[4] = {};
        if (first < end) {
            const u8 *k = global_pointer(reinterpret_cast<const u8 *>(a.k_pages[entry[0]]));
            const u8 *v = global_pointer(reinterpret_cast<const u8 *>(a.v_pages[entry[0]]));
#define SCORES(KIND) case KIND: scores_of<D, KIND>(desk, k, k_bytes, x, first, end, a.scale); break;
#define VALUES(KIND) case KIND: values_of<D, KIND>(desk, v, v_bytes, x, first, end, sums); break;
            switch (a.k_type) { FOR_EACH_KIND(SCORES) }
            block_sync();
            softmax_of<D>(desk, seen, mine.count, first, end, running);
            block_sync();
            switch (a.v_type) { FOR_EACH_KIND(VALUES) }
        }
        const int split = thread / Shape<D>::QUARTERS, d = 4 * (thread - split * Shape<D>::QUARTERS);
        const int place = running ? 0 : entry[5];
        KVS_UNROLL
        for (int m = 0; m < VECTORS; ++m) {
            if (m >= mine.count) break;
            const float sum = first < end ? desk.page[2 * m + 1] : 0.0f;
            const size_t row = size_t(place + mine.row_of(m)) * q_heads + mine.head_of(m);
            if (!running && thread == 0) {
                a.ml[2 * row] = sum != 0.0f ? desk.page[2 * m] : 0.0f;
                a.ml[2 * row + 1] = sum;
            }
            if (sum == 0.0f) continue;  // it sees nothing of this page
            float *parts = desk.parts + turn * Shape<D>::SPLITS * D;
            turn ^= 1;
            store_four(parts + split * D + d, sums[0].at[m], sums[1].at[m], sums[2].at[m], sums[3].at[m]);
            block_sync();
            if (thread >= D) continue;
            const float whole = sum_of_parts<D>(parts, thread);
            if (running) {
                const Factors by = {0.0f, desk.factors[2 * m], desk.factors[2 * m + 1]};
                desk.acc[m * D + thread] = fold(by, desk.acc[m * D + thread], whole);
            } else {
                a.acc[row * D + thread] = whole;
            }
        }
    }
    if (!running) return;
    block_sync();
    for (int m = 0; m < mine.count && thread < D; ++m) {
        const size_t row = size_t(mine.first_row + mine.row_of(m)) * q_heads + mine.head_of(m);
        const float sum = desk.state[2 * m + 1], numerator = desk.acc[m * D + thread];
        if (flags & TILE_END) {
            a.out[row * D + thread] = sum != 0.0f ? numerator / sum : 0.0f;
        } else {
            a.acc[row * D + thread] = numerator;
            if (thread < 2) a.ml[2 * row + thread] = desk.state[2 * m + thread];
        }
    }
}

// Partials of one row and query head, page after page. Eight pages are read ahead of the chain that adds them.
template <int D>
static __device__ __forceinline__ void fold_table(const float *acc, const float *ml, const int *rows, float *out,
                                                  int q_heads) {
    constexpr int AHEAD = 8;
    const int *row = rows + FOLD_INTS * blockIdx.y;
    const int first = row[0], stride = row[1], pages = row[2], head = int(blockIdx.x), d = int(threadIdx.x);
    float top = float_of_bits(0xff800000u), total = 0.0f, numerator = 0.0f;
    for (int page = 0; page < pages; page += AHEAD) {
        float tops[AHEAD], sums[AHEAD], parts[AHEAD];
        KVS_UNROLL
        for (int n = 0; n < AHEAD; ++n) {
            const size_t at = size_t(first + (page + n) * stride) * q_heads + head;
            sums[n] = page + n < pages ? ml[2 * at + 1] : 0.0f;
            tops[n] = sums[n] != 0.0f ? ml[2 * at] : 0.0f;
            parts[n] = sums[n] != 0.0f ? acc[at * D + d] : 0.0f;
        }
        KVS_UNROLL
        for (int n = 0; n < AHEAD; ++n) {
            if (sums[n] == 0.0f) continue;
            const Factors by = fold_factors(top, tops[n]);
            top = by.top;
            total = fold(by, total, sums[n]);
            numerator = fold(by, numerator, parts[n]);
        }
    }
    out[(size_t(row[3]) * q_heads + head) * D + d] = total != 0.0f ? numerator / total : 0.0f;
}
