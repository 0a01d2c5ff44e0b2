// Decode attention over packed pages, for NVIDIA GPUs from compute capability 8.0 on.
//
// Compiled at run time for one geometry: D (head dimension), G (query heads a KV head), NT (tiles of 4 query columns, a
// column being one query token and head), HKV (KV heads), KIND (dtype of exact rows: 0 float32, 1 bfloat16, 2 float16).
//
// One warp reads one page of 64 tokens at a time. Its codes go to the tensor cores as they are: one AND leaves the bits of
// four codes, each an unsigned byte x 4^p for a code x at bit 2p. Queries and softmax weights are 16-bit integers, their
// high and low bytes two columns of the other operand, so that products are exact and nothing is converted before them.
//   logits [tokens, columns] = K [tokens, D] q^T:  A = codes, rows are tokens; B = queries, in registers throughout
//   o'^T   [D, columns]      = V^T [D, tokens] w^T: A = codes of four tokens, brought together by byte permutations
// For keys the upper nibble is shifted down and a factor 1/4 is in the queries' integers; weights are scaled to their
// page's largest, so a page's sum fits 32 bits and
// joins the running sum as float32. Which channel or token a place in a fragment stands for is free as long as both
// operands agree, and is chosen such that a thread has one column and eight neighbouring tokens, and planes need no
// shuffles. Bound by memory, closely followed by the issue of about 550 instructions a page at 2 bits.

__device__ void attend_packed(const Params& P, Smem& S, u8* rings, int split, int h, int b) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Reader R(P, rings + warp * (SLOTS * SLOT + 32 * sizeof(Entry)), h, b, lane);
    const int newest = P.lengths[b] - 1, n_pages = pages_of(P, b);
    const int splits = shares_of(n_pages, P.splits), exact_splits = P.packed_at ? 0 : min(P.exact_splits, splits);
    // Splits that read exact pages too get fewer packed ones.
    const auto start_of = [&](int split) {
        const i64 all = n_pages + P.exact_cost * exact_splits;
        return max(0, (int)(all * split / splits) - P.exact_cost * min(split, exact_splits));
    };
    const int first = start_of(split), last = start_of(split + 1);
    // Pages that some query of this call reads packed, dealt out to splits and warps; a warp looks 32 up at a time.
    bool fresh = true;
    for (int j0 = first + warp; j0 < last || fresh; j0 += WARPS * 32) {
        Page mine;
        if (j0 + WARPS * lane < last) mine.look_up(P, b, j0 + WARPS * lane, R.oldest, newest);
        if (mine.exact && mine.exact_for_all) mine.id = -1;
        const int nk = 1 + (mine.finer[0] >= 0) + 2 * (mine.finer[2] >= 0), nv = 1 + (mine.finer[3] >= 0) + 2 * (mine.finer[5] >= 0);
        const int kind = mine.rows | nk << 8 | nv << 12 | mine.tier_k << 16 | mine.tier_v << 20 | (mine.slot >= 0) << 24;
        // Pages that are alike follow each other: their order does not matter.
        const bool ordinary = mine.start + 63 <= R.oldest;
        const int group = !ordinary ? 4 : kind == KIND_OF(1, 1, 2, 2) ? 0 : kind == KIND_OF(2, 1, 4, 2) ? 1 : kind == KIND_OF(2, 2, 4, 4) ? 2 : kind == KIND_OF(4, 4, 8, 8) ? 3 : 4;
        int ends[5], count = 0;
        #pragma unroll
        for (int g = 0; g < 5; g++) {
            const u32 found = __ballot_sync(~0u, mine.id >= 0 && group == g);
            if (mine.id >= 0 && group == g) {
                Entry& to = R.entries[count + __popc(found & ((1u << lane) - 1))];
                to.page = make_int4(mine.id, mine.start, kind, 0);
                #pragma unroll
                for (int i = 0; i < 6; i++) to.finer[i] = mine.finer[i];
            }
            ends[g] = count += __popc(found);
        }
        __syncwarp();
        // The first pages are on their way while queries and centers are looked at.
        const int kinds = (ends[0] > 0) + 2 * (ends[1] > ends[0]) + 4 * (ends[2] > ends[1]) + 8 * (ends[3] > ends[2]), first_kind = __ffs(kinds);
        if (first_kind == 1) R.begin<1, 1>(0, ends[0]);
        else if (first_kind == 2) R.begin<2, 1>(0, ends[1]);
        else if (first_kind == 3) R.begin<2, 2>(0, ends[2]);
        else if (first_kind == 4) R.begin<4, 4>(0, ends[3]);
        if (fresh) R.take_queries(b);
        fresh = false;
        if (count == 0) continue;
        if (CENTERED) R.centers(count);
        __syncwarp();
        if (kinds & 1) R.run<1, 1>(0, ends[0], true);
        if (kinds & 2) R.run<2, 1>(ends[0], ends[1], first_kind == 2);
        if (kinds & 4) R.run<2, 2>(ends[1], ends[2], first_kind == 3);
        if (kinds & 8) R.run<4, 4>(ends[2], ends[3], first_kind == 4);
        if (ends[4] > ends[3]) R.run_any(ends[3], ends[4]);
    }
    __syncthreads();

    #pragma unroll
    for (int n = 0; n < NT; n++) {
        const int col = 4 * n + R.c;
        const float mass = sum_rows(R.l[n]), offset = sum_rows(R.off[n]);
        if (R.r == 0) { S.m[warp][col] = R.m[n]; S.l[warp][col] = mass; }
#if MEASURED
        #pragma unroll
        for (int z = 0; z < 3; z++) {
            const float sum = sum_rows(R.spread[n][z]);
            if (R.r == 0) S.spread[warp][col][z] = sum;
        }
#endif
        #pragma unroll
        for (int k = 0; k < VW; k++)
            #pragma unroll
            for (int j = 0; j < 4; j++)
                #pragma unroll
                for (int p = 0; p < 4; p++) {
                    const float down = p == 0 ? 1.f : p == 1 ? 0.25f : p == 2 ? 0.0625f : 0.015625f;
                    if (R.r * VW + k < NW) S.o[warp][col][p * (D / 4) + 4 * (R.r * VW + k) + j] = fmaf(R.o[n][k][j][p], down, offset);
                }
    }
}

// Exact rows of the windows and the open page, in plain float32. Blocks take such pages in turn, a warp 16 rows of a page,
// two lanes a row; then each lane pairs of channels of the output. Loads of a page's K and V are under way together.
__device__ void attend_exact(const Params& P, Smem& S, float (*weights)[NCOL][16], float (*q)[D], int share, int shares, int h, int b) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 row0 = ((i64)b * HKV + h) * NCOL;
    const int length = P.lengths[b], newest = length - 1, oldest = length - P.tokens;
    constexpr int PAIRS = (D + 63) / 64, BYTES = KIND == 0 ? 4 : 2;
    constexpr int STEPS = D / 16, AT_ONCE = STEPS < 16 / BYTES ? STEPS : 16 / BYTES;
    constexpr int FIT = 64 / (PAIRS * BYTES), ROWS = FIT >= 16 ? 16 : FIT >= 8 ? 8 : 4;
    static_assert(ROWS <= FIT && 16 % ROWS == 0, "rows of V that are under way make up a warp's 16");
    float o[NCOL][PAIRS][2], m[NCOL], l[NCOL];
    #pragma unroll
    for (int col = 0; col < NCOL; col++) {
        m[col] = NEVER;
        l[col] = 0.f;
        #pragma unroll
        for (int k = 0; k < PAIRS; k++) o[col][k][0] = o[col][k][1] = 0.f;
    }
    // The windows are at both ends, and pages that are not closed among the 16 at either: so many are looked up at a time,
    // as far as windows go.
    int low = 0, high = pages_of(P, b), seen = 0;
    bool more_low = true, more_high = true, ready = false;
    while (low < high && (more_low || more_high)) {
        const int n_low = more_low ? min(16, high - low) : 0, n_high = more_high ? min(16, high - low - n_low) : 0;
        Page mine;
        if (lane < n_low) mine.look_up(P, b, low + lane, oldest, newest);
        else if (lane >= 16 && lane - 16 < n_high) mine.look_up(P, b, high - 1 - (lane - 16), oldest, newest);
        const u32 found = __ballot_sync(~0u, mine.id >= 0 && (mine.exact || mine.exact_for_all));
        const u32 within = __ballot_sync(~0u, mine.id >= 0 && (mine.tier_k == 0 || in_window(mine.start, oldest, P.sink, P.recent)));
        more_low = n_low && within >> (n_low - 1) & 1;
        more_high = n_high && within >> (15 + n_high) & 1;
        low += n_low;
        high -= n_high;
        if (!ready) finished_before();
        for (u32 todo = found; todo; todo &= todo - 1) {
            if (seen++ % shares != share) continue;
            const int at = __ffs(todo) - 1;
            const int from = __shfl_sync(~0u, mine.start, at), n = min(__shfl_sync(~0u, mine.rows, at), length - from);
            const bool open = __shfl_sync(~0u, mine.tier_k, at) == 0;
            const int row = 16 * warp + (lane >> 1);
            const i64 base = ((i64)__shfl_sync(~0u, mine.slot, at) * 2 * HKV + h) * 64 * D;
            const i64 k_at = base + (i64)row * D + (lane & 1) * 8, v_at = base + (i64)(HKV * 64 + 16 * warp) * D + 2 * lane;
            Eight k[AT_ONCE];
            Pair v[ROWS][PAIRS];
            const auto take_k = [&](int first) {
                #pragma unroll
                for (int i = 0; i < AT_ONCE; i++) k[i] = row < n && first + i < STEPS ? eight_at(P.exact, k_at + 16 * (first + i)) : Eight{};
            };
            const auto take_v = [&](int first) {
                #pragma unroll
                for (int i = 0; i < ROWS; i++)
                    #pragma unroll
                    for (int z = 0; z < PAIRS; z++)
                        v[i][z] = 16 * warp + first + i < n && 2 * lane + 64 * z < D ? pair_at(P.exact, v_at + (first + i) * D + 64 * z) : Pair{};
            };
            take_k(0);
            take_v(0);
            if (!ready) {
                for (int i = threadIdx.x; i < NCOL * D; i += 32 * WARPS) q[i / D][i % D] = P.q_exact[row0 * D + i];
                __syncthreads();
                ready = true;
            }
            float x[NCOL];
            #pragma unroll
            for (int col = 0; col < NCOL; col++) x[col] = 0.f;
            #pragma unroll
            for (int first = 0; first < STEPS; first += AT_ONCE) {
                if (first) take_k(first);
                #pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    if (first + i >= STEPS) break;
                    const int d = 16 * (first + i) + (lane & 1) * 8;
                    float y[8];
                    numbers(k[i], y);
                    #pragma unroll
                    for (int col = 0; col < NCOL; col++)
                        #pragma unroll
                        for (int e = 0; e < 8; e++) x[col] = fmaf(q[col][d + e], y[e], x[col]);
                }
            }
            #pragma unroll
            for (int col = 0; col < NCOL; col++) {
                const int token = col / G, t = token < P.tokens ? oldest + token : -1;
                const bool reads = open || in_window(from, t, P.sink, P.recent);
                float y = x[col] + __shfl_xor_sync(~0u, x[col], 1);
#if CAPPED
                y = capped(y, P.softcap);
#endif
                if (!reads || row >= n || from + row > t) y = NEVER;
                float top = y;
                #pragma unroll
                for (int z = 2; z < 32; z *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, z));
                const float now = fmaxf(m[col], top), keep = exp2_(m[col] - now);
                m[col] = now;
                l[col] *= keep;
                #pragma unroll
                for (int z = 0; z < PAIRS; z++) { o[col][z][0] *= keep; o[col][z][1] *= keep; }
                y = y == NEVER ? 0.f : exp2_(y - now);
                if (lane & 1) weights[warp][col][lane >> 1] = y; else l[col] += y;
            }
            __syncwarp();
            #pragma unroll
            for (int first = 0; first < 16; first += ROWS) {
                if (first) take_v(first);
                #pragma unroll
                for (int i = 0; i < ROWS; i++)
                    #pragma unroll
                    for (int z = 0; z < PAIRS; z++) {
                        float y[2];
                        numbers(v[i][z], y);
                        #pragma unroll
                        for (int col = 0; col < NCOL; col++)
                            #pragma unroll
                            for (int e = 0; e < 2; e++) o[col][z][e] = fmaf(weights[warp][col][first + i], y[e], o[col][z][e]);
                    }
            }
            __syncwarp();
        }
    }
    #pragma unroll
    for (int col = 0; col < NCOL; col++) {
        float mass = l[col];
        #pragma unroll
        for (int z = 1; z < 32; z *= 2) mass += __shfl_xor_sync(~0u, mass, z);
        if (lane == 0) { S.m[warp][col] = m[col]; S.l[warp][col] = mass; }
        #pragma unroll
        for (int z = 0; z < PAIRS; z++)
            #pragma unroll
            for (int e = 0; e < 2; e++) if (2 * lane + 64 * z < D) S.o[warp][col][2 * lane + 64 * z + e] = o[col][z][e];
    }
}

// A block's result from its warps'.
__device__ void write(const Params& P, const Smem& S, bool packed, int split, int h, int b) {
    __syncthreads();
    float* out = P.partial + ((((i64)(packed ? 0 : P.splits) + split) * gridDim.z + b) * HKV + h) * NCOL * PART;
    for (int i = threadIdx.x; i < NCOL * D; i += 32 * WARPS) {
        const int col = i / D, d = i % D;
        float top = NEVER, share[WARPS], sum = 0.f;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, S.m[w][col]);
        #pragma unroll
        for (int w = 0; w < WARPS; w++) {
            share[w] = exp2_(S.m[w][col] - top);
            sum = fmaf(S.o[w][col][d], share[w], sum);
        }
        out[col * PART + d] = sum;
        if (d == 0) {
            float mass = 0.f;
            #pragma unroll
            for (int w = 0; w < WARPS; w++) mass = fmaf(S.l[w][col], share[w], mass);
            out[col * PART + D] = top;
            out[col * PART + D + 1] = mass;
        }
#if MEASURED
        if (packed && d < 3) {
            float of = 0.f;
            #pragma unroll
            for (int w = 0; w < WARPS; w++) of = fmaf(S.spread[w][col][d], d ? share[w] * share[w] : share[w], of);
            out[col * PART + D + 2 + d] = of;
        }
#endif
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) lamina_decode(const __grid_constant__ Params P) {
    DYNAMIC_SHARED(uint4, shared);
    Smem& S = *(Smem*)shared;
    float (*weights)[NCOL][16] = (float (*)[NCOL][16])(&S + 1);
    float (*q)[D] = (float (*)[D])(weights + WARPS);
    const int h = blockIdx.x, b = blockIdx.z, share = blockIdx.y, split = share - P.packed_at;
    const int splits = shares_of(pages_of(P, b), P.splits), shares = min(P.exact_splits, splits);
    const bool exact = share < shares;
    if (split >= 0 && split < splits) {
        attend_packed(P, S, (u8*)shared, split, h, b);
        if (!exact) next_may_start();
        write(P, S, true, split, h, b);
    }
    if (exact) {
        attend_exact(P, S, weights, q, share, shares, h, b);
        next_may_start();
        write(P, S, false, share, h, b);
    }
}

#define SLICES (D > 128 ? 2 : 4)
#define WIDE ((D + 31) / 32 * 32)

// Rows of the new tokens that go into the pages they belong to, which are open and have room.
struct NewRows {
    const void *k, *v;             // [B, HKV, tokens, D], or null
    i64 k_b, k_h, k_t, v_b, v_h, v_t;
    void* exact;
    const int *table, *page_ids, *lengths;  // the new tokens included
    int* damaged;                  // becomes ``mark`` where a row holds NaN or Inf; counts such numbers if that is 0
    int width, mark, cut;
};

DEVICE void append(const NewRows& R, int tokens, int h, int b) {
    const int* ids = R.page_ids + (i64)b * R.width;
    const int length = R.lengths[b], last = pages_of(ids, R.width, length, R.cut) - 1;
    int bad = 0;
    // Rows that fill up a batch have no tokens.
    if (length < tokens) return;
    const auto number = [&](int t, int i) {
        const int d = i < D ? i : i - D;
        return i < D ? exact_at(R.k, b * R.k_b + h * R.k_h + t * R.k_t + d) : exact_at(R.v, b * R.v_b + h * R.v_h + t * R.v_t + d);
    };
    // Under way while the page is found.
    const float first = threadIdx.x < 2 * D ? number(0, threadIdx.x) : 0.f;
    for (int t = 0; t < tokens; t++) {
        const int position = length - tokens + t;
        int j = last;
        while (j > 0 && R.table[(i64)ids[j] * COLUMNS] > position) j--;
        const int* page = R.table + (i64)ids[j] * COLUMNS;
        if (page[10] < 0) continue;
        const i64 to = (((i64)page[10] * 2 * HKV + h) * 64 + position - page[0]) * D;
        for (int i = threadIdx.x; i < 2 * D; i += blockDim.x) {
            const float x = t == 0 && i == threadIdx.x ? first : number(t, i);
            write_exact(R.exact, to + (i < D ? i : (i64)(HKV * 64 - 1) * D + i), x);
            bad += (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
        }
    }
    if (bad && R.mark) atomicMax(R.damaged, R.mark);
    if (bad && !R.mark) atomicAdd(R.damaged, bad);
}

// q' = q q_forward, scaled, in the form that lamina_decode takes. One block a sequence and KV head, and one more each that
// appends new rows, if there are any; SLICES * WIDE threads.
extern "C" __global__ void __launch_bounds__(SLICES * WIDE) lamina_query(
    const void* q, i64 stride_b, i64 stride_h, i64 stride_t, const float* q_forward, float scale, int tokens,
    char* packed, float* meta, float* exact, const __grid_constant__ NewRows new_rows
) {
    const int h = blockIdx.x, b = blockIdx.y, d = threadIdx.x % WIDE, slice = threadIdx.x / WIDE;
    __shared__ float x[NCOL][D], sums[SLICES][NCOL][D];
    constexpr int EACH = D / SLICES, STEP = EACH < 32 ? EACH : EACH % 32 == 0 ? 32 : EACH % 16 == 0 ? 16 : 4;
    const float* matrix = q_forward + ((i64)h * D + slice * EACH) * D + d;
    float row[STEP];
    #pragma unroll
    for (int k = 0; k < STEP; k++) row[k] = d < D ? matrix[k * D] : 0.f;
    finished_before();
    next_may_start();
    if (blockIdx.z) return append(new_rows, tokens, h, b);
    const i64 row0 = ((i64)b * HKV + h) * NCOL;
    for (int i = threadIdx.x; i < NCOL * D; i += blockDim.x) {
        const int col = i / D, token = col / G, head = h * G + col % G;
        const float y = token < tokens ? exact_at(q, b * stride_b + head * stride_h + token * stride_t + i % D) * scale : 0.f;
        x[col][i % D] = y;
        exact[row0 * D + i] = y;
    }
    float y[NCOL];
    #pragma unroll
    for (int col = 0; col < NCOL; col++) y[col] = 0.f;
    __syncthreads();
    for (int k0 = 0; k0 < EACH; k0 += STEP) {
        if (k0) {
            #pragma unroll
            for (int k = 0; k < STEP; k++) row[k] = d < D ? matrix[(k0 + k) * D] : 0.f;
        }
        #pragma unroll
        for (int k = 0; k < STEP; k++)
            #pragma unroll
            for (int col = 0; col < NCOL; col++) y[col] = fmaf(x[col][slice * EACH + k0 + k], row[k], y[col]);
    }
    if (d < D) {
        #pragma unroll
        for (int col = 0; col < NCOL; col++) sums[slice][col][d] = y[col];
    }
    __syncthreads();
    // A warp a column.
    for (int col = threadIdx.x / 32; col < NCOL; col += blockDim.x / 32) {
        const int lane = threadIdx.x % 32;
        float v[WIDE / 32], top = 0.f, square = 0.f;
        #pragma unroll
        for (int i = 0; i < WIDE / 32; i++) {
            v[i] = 0.f;
            if (lane + 32 * i < D)
                #pragma unroll
                for (int s = 0; s < SLICES; s++) v[i] += sums[s][col][lane + 32 * i];
            top = fmaxf(top, fabsf(v[i]));
            square = fmaf(v[i], v[i], square);
        }
        for (int z = 16; z; z >>= 1) {
            top = fmaxf(top, __shfl_xor_sync(~0u, top, z));
            square += __shfl_xor_sync(~0u, square, z);
        }
        const float unit = fmaxf(top, 1e-30f) / 32512.f;
        // Codes are unsigned: their offset is taken off with the sum of what they are multiplied by, rounding included.
        float sum = 0.f;
        #pragma unroll
        for (int i = 0; i < WIDE / 32; i++) {
            const int at = lane + 32 * i, p = at / (D / 4);
            const int n = __float2int_rn(v[i] / unit * (p & 1 ? 0.25f : 1.f));
            if (at < D) {
                const int high = (n + 128) >> 8;
                packed[(2 * (row0 + col)) * D + at] = (char)high;
                packed[(2 * (row0 + col) + 1) * D + at] = (char)(n - 256 * high);
                sum += (float)(p & 1 ? 4 * n : n);
            }
        }
        for (int z = 16; z; z >>= 1) sum += __shfl_xor_sync(~0u, sum, z);
        if (lane == 0) {
            float* to = meta + (row0 + col) * 4;
            to[0] = unit;
            to[1] = sum * unit;
            to[2] = square * (LN2 / 2);  // |q'|^2 / 2 in natural units, times log2(e)
            to[3] = square * (LN2 * LN2);
        }
    }
}

// Merges the partial results, turns the packed part back into the engine's basis. One block a sequence, KV head and
// column; SLICES * WIDE threads.
extern "C" __global__ void __launch_bounds__(SLICES * WIDE, D > 128 ? 1 : 2) lamina_merge(
    const float* partial, const float* v_back, const float* mean_v, const int* page_ids, const int* lengths, int width,
    int all_splits, int most_exact, int tokens, int batch, int cut,
    void* out, float* lse_packed, float* lse, float* spread
) {
    const int h = blockIdx.x, b = blockIdx.y, col = blockIdx.z, d = threadIdx.x % WIDE, slice = threadIdx.x / WIDE;
    DYNAMIC_SHARED(float, weights);  // [all_splits + most_exact]
    const int splits = shares_of(pages_of(page_ids + (i64)b * width, width, lengths[b], cut), all_splits), exact_splits = min(most_exact, splits);
    __shared__ float found[2][SLICES][D], packed[D], exact[D], tops[2], mass[2], of_spread[3];
    const i64 stride = (i64)batch * HKV * NCOL * PART;
    const float* from = partial + (((i64)b * HKV + h) * NCOL + col) * PART;
    const int lane = threadIdx.x % 32;
    // A warp a channel of the result: its row of the matrix is there before the partial results are.
    constexpr int BESIDE = SLICES * WIDE / 32, EACH = (D + BESIDE - 1) / BESIDE, WORDS = WIDE / 32;
    float matrix[EACH][WORDS];
    #pragma unroll
    for (int i = 0; i < EACH; i++)
        #pragma unroll
        for (int k = 0; k < WORDS; k++) {
            const int row = threadIdx.x / 32 + i * BESIDE, at = lane + 32 * k;
            matrix[i][k] = row < D && at < D ? v_back[((i64)h * D + row) * D + at] : 0.f;
        }
    finished_before();
    // The first partial results are on their way while it is found what each counts for.
    constexpr int AHEAD = 6, AHEAD_EXACT = 2;
    float first[AHEAD + AHEAD_EXACT];
    #pragma unroll
    for (int i = 0; i < AHEAD + AHEAD_EXACT; i++) {
        const int s = slice + SLICES * (i < AHEAD ? i : i - AHEAD);
        first[i] = d < D && s < (i < AHEAD ? splits : exact_splits) ? from[(i < AHEAD ? s : all_splits + s) * stride + d] : 0.f;
    }
    // A warp for the packed part, one for the exact part: what each split counts for.
    if (threadIdx.x < 64) {
        const int kind = threadIdx.x / 32, first = kind ? all_splits : 0, last = first + (kind ? exact_splits : splits);
        float top = NEVER, sum = 0.f, sums[3] = {0.f, 0.f, 0.f};
        for (int s = first + lane; s < last; s += 32) top = fmaxf(top, from[s * stride + D]);
        for (int z = 16; z; z >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, z));
        for (int s = first + lane; s < last; s += 32) {
            // A split without pages has no maximum.
            const float at = from[s * stride + D], w = at == NEVER ? 0.f : exp2_(at - top);
            weights[s] = w;
            sum = fmaf(w, from[s * stride + D + 1], sum);
#if MEASURED
            for (int z = 0; z < 3; z++) sums[z] = fmaf(z ? w * w : w, from[s * stride + D + 2 + z], sums[z]);
#endif
        }
        for (int z = 16; z; z >>= 1) {
            sum += __shfl_xor_sync(~0u, sum, z);
            for (int x = 0; x < 3; x++) sums[x] += __shfl_xor_sync(~0u, sums[x], z);
        }
        if (lane == 0) {
            tops[kind] = top;
            mass[kind] = sum;
            if (kind == 0) for (int z = 0; z < 3; z++) of_spread[z] = sums[z];
        }
    }
    __syncthreads();
    if (d < D) {
        float sum[2] = {0.f, 0.f};
        #pragma unroll
        for (int i = 0; i < AHEAD + AHEAD_EXACT; i++) {
            const int s = slice + SLICES * (i < AHEAD ? i : i - AHEAD);
            if (i < AHEAD && s < splits) sum[0] = fmaf(weights[s], first[i], sum[0]);
            if (i >= AHEAD && s < exact_splits) sum[1] = fmaf(weights[all_splits + s], first[i], sum[1]);
        }
        #pragma unroll 8
        for (int s = slice + SLICES * AHEAD; s < splits; s += SLICES) sum[0] = fmaf(weights[s], from[s * stride + d], sum[0]);
        #pragma unroll 8
        for (int s = all_splits + slice + SLICES * AHEAD_EXACT; s < all_splits + exact_splits; s += SLICES) sum[1] = fmaf(weights[s], from[s * stride + d], sum[1]);
        found[0][slice][d] = sum[0];
        found[1][slice][d] = sum[1];
    }
    __syncthreads();
    if (threadIdx.x < D) {
        float a = 0.f, e = 0.f;
        #pragma unroll
        for (int s = 0; s < SLICES; s++) { a += found[0][s][d]; e += found[1][s][d]; }
        packed[d] = a;
        exact[d] = e;
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        float sum = 0.f;
        #pragma unroll
        for (int k = 0; k < WORDS; k++) if (lane + 32 * k < D) sum = fmaf(packed[lane + 32 * k], matrix[i][k], sum);
        #pragma unroll
        for (int z = 16; z; z >>= 1) sum += __shfl_xor_sync(~0u, sum, z);
        if (lane == 0 && threadIdx.x / 32 + i * BESIDE < D) found[0][0][threadIdx.x / 32 + i * BESIDE] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= D) return;
    const float turned = fmaf(mass[0], mean_v[h * D + d], found[0][0][d]);
    const float all = fmaxf(tops[0], tops[1]), wp = exp2_(tops[0] - all), we = exp2_(tops[1] - all);
    const float total = wp * mass[0] + we * mass[1];
    const float y = total > 0.f ? (wp * turned + we * exact[d]) / total : 0.f;
    const int token = col / G, head = h * G + col % G;
    const i64 at = (((i64)b * tokens + token) * HKV * G + head) * D + d;
    write_exact(out, at, y);
    const i64 i = ((i64)b * HKV * G + head) * tokens + token;
    if (d == 0) {
        lse_packed[i] = mass[0] > 0.f ? (tops[0] + log2f(mass[0])) * LN2 : -__int_as_float(0x7f800000);
        lse[i] = (all + log2f(total)) * LN2;
    }
#if MEASURED
    if (d < 3) spread[3 * i + d] = of_spread[d] * (d ? wp / total * (wp / total) : wp / total);
#endif
}
