// Kernels for the tests of the runtime itself: clean ones that look suspicious, and faulty ones that must be reported.
// All take (in, out, n) unless they say otherwise; out has one place per thread of the grid.
#define KERNEL(name)                                                  \
    extern "C" __global__ void name(const int *in, int *out, int n);  \
    SIM_KERNEL(name)                                                  \
    extern "C" __global__ void name(const int *in, int *out, int n)
#define ME int(blockIdx.x * blockDim.x + threadIdx.x)
#define T int(threadIdx.x)
#define B int(blockDim.x)

// --- clean ---------------------------------------------------------------------------------------------------------

KERNEL(clean_tiles) {  // a barrier after filling, one before filling anew
    DYN_SHARED(int, tile);
    int sum = 0;
    for (int at = 0; at < n; at += B) {
        tile[T] = in[at + T];
        block_sync();
        sum += tile[B - 1 - T] + tile[(T + 1) % B];
        block_sync();
    }
    out[ME] = sum;
}

KERNEL(clean_warp) {  // within a warp, warp_sync is enough
    DYN_SHARED(int, tile);
    for (int round = 0; round < n; ++round) {
        tile[T] = T + round;
        warp_sync();
        out[ME] = tile[T ^ 1];
        warp_sync();
    }
}

KERNEL(clean_static) {
    SHARED(int, one, 256);
    SHARED(short, two, 256);
    one[T] = T;
    two[T] = short(2 * T);
    block_sync();
    out[ME] = one[B - 1 - T] + two[(T + 1) % B];
}

KERNEL(clean_neighbours) {  // two threads write the two halves of a word: no race
    DYN_SHARED(short, tile);
    tile[T] = short(T);
    reinterpret_cast<short *>(out)[ME] = short(in[0]);
    block_sync();
    reinterpret_cast<short *>(out)[ME] = tile[T ^ 1];
}

KERNEL(clean_many_readers) {
    DYN_SHARED(int, tile);
    if (T == 0) tile[0] = n;
    block_sync();
    const int got = tile[0];
    block_sync();
    if (T == B - 1) tile[0] = got + 1;
    block_sync();
    out[ME] = tile[0];
}

KERNEL(clean_stack) {  // a thread's own arrays are nobody's business
    int mine[32];
    for (int i = 0; i < 32; ++i) mine[i] = in[(T + i) % n];
    int sum = 0;
    for (int i = 0; i < 32; ++i) sum += mine[(i * 7 + T) % 32];
    out[ME] = sum;
}

KERNEL(clean_one_after_the_other) {  // a block reads what it wrote itself, behind a barrier
    out[ME] = T;
    block_sync();
    const int other = out[int(blockIdx.x) * B + B - 1 - T];
    block_sync();
    out[ME] = other;
}

KERNEL(clean_reductions) {  // sum, maximum and sums of four, as floats in out[3 * thread]
    float *to = reinterpret_cast<float *>(out) + 3 * ME;
    const float x = reinterpret_cast<const float *>(in)[ME];
    to[0] = warp_sum(x);
    to[1] = warp_max(x);
    Eight sums = {{x, 2 * x, 3 * x, 4 * x, 5 * x, 6 * x, 7 * x, 8 * x}};
    quad_sum(sums);
    to[2] = sums.at[7] - sums.at[6] + sums.at[0];
}

extern "C" __global__ void clean_arguments(char a, double b, short c, const int *in, float d, int *out, long e) {
    if (ME == 0) out[0] = in[0] + a + int(b) + c + int(d) + int(e);
}
SIM_KERNEL(clean_arguments)

// --- races -----------------------------------------------------------------------------------------------------------

KERNEL(race_read_too_early) {
    DYN_SHARED(int, tile);
    tile[T] = in[T];
    out[ME] = tile[B - 1 - T];
}

KERNEL(race_write_too_early) {  // nothing before the tile is filled anew
    DYN_SHARED(int, tile);
    int sum = 0;
    for (int at = 0; at < n; at += B) {
        tile[T] = in[at + T];
        block_sync();
        sum += tile[B - 1 - T];
    }
    out[ME] = sum;
}

KERNEL(race_shuffle_is_no_barrier) {
    DYN_SHARED(int, tile);
    tile[T] = in[T];
    const float sum = warp_sum(float(T));
    out[ME] = tile[T ^ 1] + int(sum);
}

KERNEL(race_warp_sync_is_no_barrier_for_others) {
    DYN_SHARED(int, tile);
    tile[T] = in[T];
    warp_sync();
    out[ME] = tile[(T + 32) % B];
}

KERNEL(race_two_write) {
    DYN_SHARED(int, tile);
    tile[T / 2] = T;
    block_sync();
    out[ME] = tile[T / 2];
}

KERNEL(race_far_reader) {  // many of the own warp read after the one that is in the way
    DYN_SHARED(int, tile);
    if (T == 0) tile[0] = n;
    block_sync();
    int got = 0;
    if (T == 70 || T < 32) got = tile[0];
    warp_sync();
    if (T == 3) tile[0] = 5;
    out[ME] = got;
}

KERNEL(race_global_in_a_block) {
    out[ME] = T;
    const int other = out[int(blockIdx.x) * B + B - 1 - T];
    block_sync();
    out[ME] = other;
}

KERNEL(race_global_between_blocks) {
    out[ME] = T;
    block_sync();
    if (blockIdx.x > 0) out[ME] = out[ME - B] + 1;
}

// --- other faults ----------------------------------------------------------------------------------------------------

KERNEL(fault_uninitialised_shared) {
    DYN_SHARED(int, tile);
    if (T > 0) tile[T] = T;
    block_sync();
    out[ME] = tile[T];
}

KERNEL(fault_shared_read_beyond) {
    DYN_SHARED(int, tile);
    tile[T] = T;
    block_sync();
    out[ME] = tile[T + 1];
}

KERNEL(fault_shared_write_beyond) {
    DYN_SHARED(int, tile);
    tile[T + 1] = T;
    tile[T] = T;
    out[ME] = 0;
}

KERNEL(fault_global_beyond) { out[ME + 1] = in[T]; }
KERNEL(fault_uninitialised_global) { out[ME] = out[ME] + 1; }
KERNEL(fault_wild) { out[ME] = *reinterpret_cast<int *>(uintptr_t(n)); }

KERNEL(fault_barrier_not_for_all) {
    if (T < n) block_sync();
    out[ME] = T;
}

KERNEL(fault_two_barriers) {
    if (T < 32) {
        block_sync();
    } else {
        block_sync();
    }
    out[ME] = T;
}

KERNEL(fault_divergent_warp) {
    float x = float(T);
    if (T % 2) {
        x = warp_sum(x);
    } else {
        x = warp_sum(x + 1);
    }
    out[ME] = int(x);
}

KERNEL(fault_lane_left) {
    if (T == 5) return;
    out[ME] = int(warp_max(float(T)));
}

KERNEL(fault_half_a_warp) { out[ME] = int(warp_sum(1.0f)); }  // launched with less than 32 threads
