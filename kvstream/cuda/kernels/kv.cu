// The kernels by name. README.md in this folder: arguments, grid, block, shared memory.
#include "wide.cuh"

extern "C" __global__ void __launch_bounds__(128)
kv_write(const float *k_source, const float *v_source, const u64 *k_rows, const u64 *v_rows, int rows, int values,
         int k_type, int v_type) {
    const int chunks = (values + 31) / 32, index = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= rows * chunks) return;
    const int row = index / chunks, x = 32 * (index - row * chunks), left = values - x;
    const bool is_k = blockIdx.y == 0;
    const int kind = is_k ? k_type : v_type;
    const float *from = (is_k ? k_source : v_source) + size_t(row) * values + x;
    u8 *to = reinterpret_cast<u8 *>((is_k ? k_rows : v_rows)[row]) + row_bytes(kind, x);
    const int count = left < 32 ? left : 32;
#define ENCODE(KIND) case KIND: encode<KIND>(to, from, count); break;
    switch (kind) { FOR_EACH_KIND(ENCODE) }
}
SIM_KERNEL(kv_write)

// Reads host memory that is page-locked, so it waits for no copy. All words are on their way at once: over the link a
// load takes a microsecond.
extern "C" __global__ void __launch_bounds__(256)
kv_tables(const float *from, float *to, int words, int scattered) {
    const int *places = reinterpret_cast<const int *>(from + 4 * size_t(words));
    const int stride = int(gridDim.x * blockDim.x);
    for (int word = int(blockIdx.x * blockDim.x + threadIdx.x); word < words; word += stride) {
        const Four got = load_four(from + 4 * size_t(word));
        store_four(to + 4 * size_t(scattered ? places[word] : word), got.at[0], got.at[1], got.at[2], got.at[3]);
    }
}
SIM_KERNEL(kv_tables)
SIM_SOURCE(kv_tables, from, size_t(words) * (scattered ? 20 : 16), const float *from, float *, int words, int scattered)

#define HEAD_SIZE(D)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(Shape<D>::THREADS, 512 / Shape<D>::THREADS)                            \
    kv_attend_##D(const float *q, const u64 *k_pages, const u64 *v_pages, const int *entries, const int *positions,     \
                  const int *tiles, float *acc, float *ml, float *out, float scale, int kv_heads, int group,            \
                  int page_tokens, int k_type, int v_type, int window) {                                                \
        attend<D>({q, k_pages, v_pages, entries, positions, tiles, acc, ml, out, scale, kv_heads, group, page_tokens,   \
                   k_type, v_type, window});                                                                            \
    }                                                                                                                   \
    SIM_KERNEL(kv_attend_##D)                                                                                           \
    extern "C" __global__ void __launch_bounds__(WIDE_THREADS, Strip<D>::BLOCKS)                                        \
    kv_wide_##D(const float *q, const u64 *k_pages, const u64 *v_pages, const int *entries, const int *positions,       \
                const int *tiles, float *acc, float *ml, float *out, float scale, int kv_heads, int group,              \
                int page_tokens, int k_type, int v_type, int window) {                                                  \
        attend_wide<D>({q, k_pages, v_pages, entries, positions, tiles, acc, ml, out, scale, kv_heads, group,           \
                        page_tokens, k_type, v_type, window});                                                          \
    }                                                                                                                   \
    SIM_KERNEL(kv_wide_##D)                                                                                             \
    extern "C" __global__ void __launch_bounds__(D)                                                                     \
    kv_fold_##D(const float *acc, const float *ml, const int *rows, float *out, int q_heads) {                          \
        fold_table<D>(acc, ml, rows, out, q_heads);                                                                     \
    }                                                                                                                   \
    SIM_KERNEL(kv_fold_##D)

HEAD_SIZE(64)
HEAD_SIZE(80)
HEAD_SIZE(96)
HEAD_SIZE(128)
HEAD_SIZE(256)
