// Writes what has changed in page tables, wherever they are, in one launch.

// ``n`` numbers from ``values + from`` on go to ``to``.
struct Patch {
    int* to;
    int from, n;
};

extern "C" __global__ void lamina_patch(const Patch* patches, const int* values) {
    const Patch patch = patches[blockIdx.x];
    for (int i = threadIdx.x; i < patch.n; i += blockDim.x) patch.to[i] = values[patch.from + i];
}

// Page ids and lengths of a batch from an engine's block table: -1 behind the last page of a row. One block a row.
extern "C" __global__ void lamina_page_ids(
    const int* blocks, i64 stride, const int* seq_lens, int width, int* page_ids, int* lengths
) {
    const int b = blockIdx.x, n = seq_lens[b];
    for (int j = threadIdx.x; j < width; j += blockDim.x) page_ids[(i64)b * width + j] = 64 * j < n ? blocks[b * stride + j] : -1;
    if (threadIdx.x == 0) lengths[b] = n;
}
