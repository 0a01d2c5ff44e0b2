// Where products leave their results, lane 4 r + c of a warp has rows r (and r + 8) and columns of its own: sums and maxima
// over the four lanes of a row, and over the eight of a column.

DEVICE float sum_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
DEVICE float max_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float sum_rows(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}
DEVICE float max_rows(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

// Logits are in units of log2(e), and so is the cap.
#define LN2 0.69314718056f
DEVICE float capped(float x, float cap) {
    const float e = exp2_(x / cap * 2.8853900817779268f);
    return cap * (1.f - 2.f / (e + 1.f));
}
