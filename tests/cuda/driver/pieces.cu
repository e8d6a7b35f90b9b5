// Pieces of the kernels that have tests of their own.
#include "wide.cuh"

extern "C" __global__ void piece_exponential(const float *in, float *out, int n) {
    const int me = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (me < n) out[me] = exponential(in[me]);
}
SIM_KERNEL(piece_exponential)

extern "C" __global__ void piece_power(const float *in, float *out, int n) {
    const int me = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (me < n) out[me] = power_of_two<15>(in[me]);
}
SIM_KERNEL(piece_power)

// One warp: registers of all lanes in, c out. `registers`: [lane][10], c0 .. c3, a0 .. a3, b0, b1.
extern "C" __global__ void piece_mma(const unsigned *registers, float *out, int) {
    const unsigned *mine = registers + 10 * threadIdx.x;
    Four c;
    Quad a;
    for (int n = 0; n < 4; ++n) {
        c.at[n] = float_of_bits(mine[n]);
        a.at[n] = mine[4 + n];
    }
    const Pair b = {{mine[8], mine[9]}};
    mma_16816(c, a, b);
    for (int n = 0; n < 4; ++n) out[4 * threadIdx.x + n] = c.at[n];
}
SIM_KERNEL(piece_mma)
