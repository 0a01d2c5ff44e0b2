// Rows of a step's tokens, on their way into pages.

// Where the tokens' rows lie: strides in numbers between tokens and between KV heads.
struct Rows {
    const void *k, *v;
    i64 k_t, k_h, v_t, v_h;
};

// Writes rows to pages that have exact rows. Jobs of encode.cu without rows get those of the token that starts their
// page. One block a token and KV head.
extern "C" __global__ void lamina_rows(
    const __grid_constant__ Rows R, const i64* slots, const int* table, void* exact, const u8* records, i64* jobs,
    int n_jobs, int* damaged
) {
    const int t = blockIdx.x, h = blockIdx.y;
    // Slots are numbered through all pages; those of tokens that fill up a batch are negative.
    if (slots[t] < 0) return;
    const i64 page = slots[t] / 64, row = slots[t] % 64, slot = table[page * COLUMNS + 10];
    int bad = 0;
    for (int i = threadIdx.x; i < 2 * D; i += blockDim.x) {
        const bool v = i >= D;
        const int d = v ? i - D : i;
        const float x = v ? exact_at(R.v, t * R.v_t + h * R.v_h + d) : exact_at(R.k, t * R.k_t + h * R.k_h + d);
        if (slot >= 0) write_exact(exact, ((slot * 2 + v) * HKV + h) * 64 * D + row * D + d, x);
        bad += (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
    }
    if (bad) atomicAdd(damaged, bad);
    if (row || h) return;
    const i64 record = (i64)(records + page * RECORD_BYTES);
    for (int i = threadIdx.x; i < n_jobs; i += blockDim.x) {
        i64* job = jobs + i * JOB_WORDS;
        if (job[6] != record || job[0]) continue;
        job[0] = (i64)((const char*)R.k + t * R.k_t * ROW_SIZE);
        job[1] = (i64)((const char*)R.v + t * R.v_t * ROW_SIZE);
        job[2] = R.k_h; job[3] = R.v_h;
        job[4] = R.k_t; job[5] = R.v_t;
    }
}
