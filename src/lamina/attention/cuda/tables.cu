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
