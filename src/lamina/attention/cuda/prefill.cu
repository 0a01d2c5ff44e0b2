// Attention of many query tokens over what is stored before them and over themselves, for NVIDIA GPUs from compute
// capability 8.0 on.
//
// Compiled for one geometry: D, HKV, CENTERED, KIND (see pages.cu), G (query heads a KV head) and CAPPED. A block has four
// warps and 64 rows, a row being one query token and head of a KV head's group; a warp has 16 of them.
//   lamina_list     what there is to read of each sequence, once for all blocks
//   lamina_packed   packed pages in the packed basis: codes travel to shared memory as planes, become bytes there once for
//                   all warps, and go to the tensor cores as float16: a byte is the subnormal number code x 2^-24
//   lamina_exact    exact rows of pages, and those of the chunk itself
// Queries are float16 relative to their largest channel, twice where rows are finer than bfloat16; steps, midpoints and
// centers join after the product in float32. A step of V is part of the softmax weight, relative to the largest step so far.
// Which channel or token a place in a fragment stands for is free as long as both operands agree.
//
// lamina_packed is bound by the issue of instructions: for each product of 16 x 8 x 16, two permutations of bytes and about
// as many instructions of the softmax; memory hardly matters, as planes are read once for 64 rows.

#define WARPS 4
#define THREADS (32 * WARPS)
#define TILE (16 * WARPS)
#define KS (D / 16)            // products along a row
#define KQ ((KS + 3) / 4)      // four of them are one read of codes
#define OT (D / 8)             // tiles of the output's channels
#define PARTS (KIND == 1 ? 1 : 2)     // float16 numbers a query channel in the packed basis
#define NONE __int_as_float(0xff800000)
#define LISTERS 1024

struct Entry {
    int id, start, rows, planes;  // planes of K | of V << 4 | bits of K << 8 | of V << 12
    int finer[6];                 // slabs beyond the base: K's, V's
    int slot, unused;             // of exact rows, or -1
};
struct Params {
    const float* q;               // [HKV G, total, D]: q' * scaling * log2(e)
    const u8 *records, *slabs;
    const Entry* entries;         // [B, width]
    const int *counts, *lengths, *starts;  // [B, 2], [B], [B + 1]: tokens of row b's chunk are [starts[b], starts[b + 1])
    const float* kappa;           // [HKV, 3, 3]
    float *out, *lse;             // [splits, HKV G, total, D], [splits, HKV G, total]
    // This call has tokens [first, first + count) of a row's chunk, or as many as there are; not all only of one row.
    int width, total, first, count, splits, sink, recent;
    float softcap;                // in units of log2(e)
};

// Pages with rows before the chunk, in order: those that some token reads packed, those that some token reads exactly.
extern "C" __global__ void __launch_bounds__(LISTERS) lamina_list(
    const int* table, const int* page_ids, const int* lengths, const int* starts, int width, int sink, int recent,
    Entry* packed, int4* exact, int* counts
) {
    const int b = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, length = lengths[b];
    const int before = length - starts[b + 1] + starts[b];
    __shared__ int found[2][LISTERS / 32];
    int at[2] = {0, 0};
    for (int j0 = 0; j0 < width; j0 += LISTERS) {
        const int j = j0 + threadIdx.x, id = j < width ? page_ids[(i64)b * width + j] : -1;
        int t[COLUMNS] = {}, rows = 0;
        bool in[2] = {false, false};
        if (id >= 0) {
            #pragma unroll
            for (int k = 0; k < COLUMNS; k++) t[k] = table[(i64)id * COLUMNS + k];
            rows = min(t[1], before - t[0]);
            const bool open = t[2] == 0, slot = t[10] >= 0;
            in[0] = rows > 0 && !open && !(slot && in_window(t[0], length - 1, sink, recent));
            in[1] = rows > 0 && (open || (slot && in_window(t[0], before, sink, recent)));
        }
        u32 mine[2];
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            mine[k] = __ballot_sync(~0u, in[k]);
            if (lane == 0) found[k][warp] = __popc(mine[k]);
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            int to = at[k] + __popc(mine[k] & ((1u << lane) - 1));
            for (int w = 0; w < LISTERS / 32; w++) {
                if (w < warp) to += found[k][w];
                at[k] += found[k][w];
            }
            if (!in[k]) continue;
            if (k == 1) exact[(i64)b * width + to] = make_int4(t[10], t[0], rows, t[2] == 0);
            else {
                const int nk = 1 + (t[4] >= 0) + 2 * (t[6] >= 0), nv = 1 + (t[5] >= 0) + 2 * (t[8] >= 0);
                packed[(i64)b * width + to] = {id, t[0], rows, nk | nv << 4 | t[2] << 8 | t[3] << 12, {t[4], t[6], t[7], t[5], t[8], t[9]}, t[10], 0};
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < 2) counts[2 * b + threadIdx.x] = threadIdx.x ? at[1] : at[0];
}

// Running softmax of a warp's rows r and r + 8: maxima in units ``up`` of log2(e), masses of this thread's columns, output.
struct Rows {
    float m[2], l[2], o[OT][4];

    DEVICE Rows() : m{NONE, NONE}, l{0.f, 0.f} {
        #pragma unroll
        for (int t = 0; t < OT; t++)
            #pragma unroll
            for (int e = 0; e < 4; e++) o[t][e] = 0.f;
    }
    // Logits become weights; what was summed before counts for ``keep``.
    template <int N>
    DEVICE bool weigh(float (&s)[N][4], const float (&up)[2], float (&keep)[2]) {
        bool higher = false;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = m[i];
            #pragma unroll
            for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
            top = max_quad(top);
            const float base = top == NONE ? 0.f : top * up[i];
            keep[i] = m[i] == top ? 1.f : exp2_(fmaf(m[i], up[i], -base));
            higher = higher || m[i] != top;
            m[i] = top;
            float sum = 0.f;
            #pragma unroll
            for (int n = 0; n < N; n++)
                #pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    s[n][e] = exp2_(fmaf(s[n][e], up[i], -base));
                    sum += s[n][e];
                }
            l[i] = fmaf(l[i], keep[i], sum);
        }
        return __any_sync(~0u, higher);
    }
    DEVICE void scale(float a, float b) {
        #pragma unroll
        for (int t = 0; t < OT; t++) { o[t][0] *= a; o[t][1] *= a; o[t][2] *= b; o[t][3] *= b; }
    }
    DEVICE float lse(int i, float up, float mass) const { return mass > 0.f ? (m[i] * up + log2f(mass)) * LN2 : NONE; }
};

// Shared memory of lamina_packed.
struct Packed {
    uint4 q[PARTS][WARPS][KS][32];       // operands of each lane
    uint4 k[8][KQ][32];                  // codes of a lane's token (and plane of channels), four words of them at a time
    uint4 v[OT][32];                     // codes of a lane's channel: words of four tokens
    u32 raw_k[4][64 * KS];
    u32 raw_v[4][64 * (KS | 4)];
    u16 raw_scales[2][64], raw_mids[2][64];
    float centers[WARPS][8][16];         // of eight pages, times rows
    float step_k[64], base_k[64], noise[64], step_v[64], base_v[64];  // of tokens in the order of the products
    float unit, down;                    // V's steps are relative to this; what earlier output counts for
};

// Tokens 16 s + 4 c + 2 f + e are columns 2 c + e of tiles 2 s + f.
DEVICE int place_of(int t) { return (t & ~15) + 8 * (t >> 1 & 1) + (t >> 1 & 6) + (t & 1); }

// Where a row of V's planes starts, in words: such that reads of every fourth row meet few banks twice.
DEVICE int v_row(int t) { return D % 64 ? t * KS : (16 * (t & 3) + (t >> 2)) * (KS | 4); }

// Codes of plane p in four bytes of N slabs.
template <int N>
DEVICE u32 codes_of(const u32 (&w)[N], int p) {
    u32 x = w[0] >> (2 * p) & 0x03030303u;
    if constexpr (N >= 2) x = x << 2 | (w[1] >> (2 * p) & 0x03030303u);
    if constexpr (N == 4) x = x << 4 | ((p & 1 ? w[3] : w[2]) >> (4 * (p >> 1)) & 0x0f0f0f0fu);
    return x;
}
// Word s of a row holds channels p D/4 + 4 s + 0..3: product s, lane p of a quad.
template <int N>
DEVICE void unpack_k(Packed& S) {
    for (int x = threadIdx.x; x < D; x += THREADS) {
        const int t = x / KS, s = x % KS, at = place_of(t), first = (t & 2) + (t >> 2) + s / 4;
        u32* to = (u32*)&S.k[at >> 3][s / 4][4 * (at & 7)] + s % 4;
        #pragma unroll
        for (int i = 0; i < 4; i++) {  // rows t + 16 i
            u32 w[N];
            #pragma unroll
            for (int z = 0; z < N; z++) w[z] = S.raw_k[z][x + D * i];
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                const int p = first + k & 3;  // lanes write to different banks
                to[256 * KQ * i + 4 * p] = codes_of(w, p);
            }
        }
    }
}
// Words s of rows 4 q + 0..3 become words of four tokens each; channel p D/4 + 4 s + j is number (4 p + j) KS + s.
template <int N>
DEVICE void unpack_v(Packed& S) {
    for (int x = threadIdx.x; x < D; x += THREADS) {
        const int q = x & 15, s = x >> 4;
        u32 w[4][N];
        #pragma unroll
        for (int z = 0; z < N; z++) {
            const u32* from = S.raw_v[z] + s;
            const u32 a = from[v_row(4 * q)], b = from[v_row(4 * q + 1)], c = from[v_row(4 * q + 2)], d = from[v_row(4 * q + 3)];
            const u32 ab = __byte_perm(a, b, 0x5140), AB = __byte_perm(a, b, 0x7362);
            const u32 cd = __byte_perm(c, d, 0x5140), CD = __byte_perm(c, d, 0x7362);
            w[0][z] = __byte_perm(ab, cd, 0x5410);
            w[1][z] = __byte_perm(ab, cd, 0x7632);
            w[2][z] = __byte_perm(AB, CD, 0x5410);
            w[3][z] = __byte_perm(AB, CD, 0x7632);
        }
        #pragma unroll
        for (int p = 0; p < 4; p++)
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const int number = (4 * p + j) * KS + s;
                ((u32*)S.v)[16 * number + 4 * (q & 3) + (q >> 2)] = codes_of(w[j], p);
            }
    }
}
DEVICE u32 low_codes(u32 x) { return __byte_perm(x, 0, 0x4140); }
DEVICE u32 high_codes(u32 x) { return __byte_perm(x, 0, 0x4342); }

// Two numbers as float16, which are left with what that takes away.
DEVICE u32 split_pair(float (&x)[2]) {
    const u32 pair = to_f16_pair(x[0], x[1]);
    x[0] -= from_f16((u16)pair);
    x[1] -= from_f16((u16)(pair >> 16));
    return pair;
}

extern "C" __global__ void __launch_bounds__(THREADS, D > 192 ? 1 : D > 128 ? 2 : 3) lamina_packed(const __grid_constant__ Params P) {
    DYNAMIC_SHARED(uint4, shared);
    Packed& S = *(Packed*)shared;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2, c = lane & 3;
    const int tile = blockIdx.x / P.splits, split = blockIdx.x % P.splits, h = blockIdx.y, b = blockIdx.z;
    const int tokens = P.starts[b + 1] - P.starts[b], count = min(P.count, tokens - P.first), n_rows = count * G;
    if (tile * TILE >= n_rows) return;
    const int row0 = tile * TILE + 16 * warp + r, chunk = P.lengths[b] - tokens + P.first;
    const int oldest = chunk + tile * TILE / G, newest = chunk + min(count - 1, (tile * TILE + TILE - 1) / G);
    const auto at_of = [&](int i) {
        const int row = min(row0 + 8 * i, n_rows - 1);
        return (i64)(h * G + row % G) * P.total + P.starts[b] + row / G;
    };

    // Queries: channels 4 s + 0..3 of plane c; in units of 2^-15 of a row's largest.
    float up[2], total[2], energy[2];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4* q = (const float4*)(P.q + at_of(i) * D + c * (D / 4));
        float top = 0.f, square = 0.f, sum = 0.f;
        #pragma unroll 4
        for (int s = 0; s < KS; s++) {
            const float4 x = q[s];
            top = fmaxf(fmaxf(fmaxf(top, fabsf(x.x)), fmaxf(fabsf(x.y), fabsf(x.z))), fabsf(x.w));
            square = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, square))));
        }
        top = fmaxf(max_quad(top), 1e-30f);
        const float by = 32768.f / top;
        #pragma unroll 4
        for (int s = 0; s < KS; s++) {
            const float4 x = q[s];
            float y[2][2] = {{x.x * by, x.y * by}, {x.z * by, x.w * by}};
            sum += y[0][0] + y[0][1] + y[1][0] + y[1][1];
            #pragma unroll
            for (int z = 0; z < PARTS; z++)
                #pragma unroll
                for (int e = 0; e < 2; e++) ((u32*)&S.q[z][warp][s][lane])[2 * e + i] = split_pair(y[e]);
            sum -= y[0][0] + y[0][1] + y[1][0] + y[1][1];  // of what the products are made with
        }
        up[i] = top * 512.f;  // what products with codes are multiples of; the following are in these units
        total[i] = sum_quad(sum) * (1.f / 16777216.f);
        energy[i] = sum_quad(square) * (LN2 / 2) / up[i];
    }

    const Entry* entries = P.entries + (i64)b * P.width;
    const int n_entries = P.counts[2 * b], last = (int)((i64)n_entries * (split + 1) / P.splits);
    // The first page from j on that some row of this block reads packed.
    const auto next = [&](int j) {
        while (j < last && entries[j].slot >= 0 && in_window(entries[j].start, newest, P.sink, P.recent)) j++;
        return j;
    };
    const auto send = [&](int j) {
        if (j >= last) return;
        const Entry& e = entries[j];
        const u8* record = P.records + (i64)e.id * RECORD_BYTES;
        const int nk = e.planes & 15, nv = e.planes >> 4 & 15;
        if (warp == 0)
            copy_16(shared_address(S.raw_scales) + 16 * lane, record + (lane < 16 ? SCALE_AT : MID_AT) + ((lane >> 3 & 1) * HKV + h) * 128 + (lane & 7) * 16);
        for (int z = 0; z < nk; z++) {
            const u8* from = (z ? P.slabs + (i64)e.finer[z - 1] * SLAB_BYTES : record) + h * 16 * D;
            #pragma unroll 1
            for (int u = threadIdx.x; u < D; u += THREADS) copy_16(shared_address(S.raw_k[z] + 4 * u), from + 16 * u);
        }
        for (int z = 0; z < nv; z++) {
            const u8* from = (z ? P.slabs + (i64)e.finer[2 + z] * SLAB_BYTES : record + SLAB_BYTES) + h * 16 * D;
            #pragma unroll 1
            for (int u = threadIdx.x; u < D; u += THREADS)
                copy_16(shared_address(S.raw_v[z] + (D % 64 ? 4 * u : v_row(4 * u / KS) + 4 * u % KS)), from + 16 * u);
        }
    };

    Rows R;
    float offset[2] = {0.f, 0.f};
    int centered = -1;
    if (threadIdx.x == 0) S.unit = 1e-30f;
    int j = next((int)((i64)n_entries * split / P.splits));
    send(j);
    while (j < last) {
        const Entry e = entries[j];
        const u8* record = P.records + (i64)e.id * RECORD_BYTES;
        const int nk = e.planes & 15, nv = e.planes >> 4 & 15;
        wait_for_copies();
        __syncthreads();
        if (nk == 1) unpack_k<1>(S); else if (nk == 2) unpack_k<2>(S); else unpack_k<4>(S);
        if (nv == 1) unpack_v<1>(S); else if (nv == 2) unpack_v<2>(S); else unpack_v<4>(S);
        if (warp < 2) {  // numbers of two tokens a lane: the first warp K's, the second V's
            const int planes = warp ? nv : nk, read = planes == 1 ? 2 : 2 * planes, bits = e.planes >> (8 + 4 * warp) & 15;
            const float half = 0.5f * (float)((1 << read) - 1);
            const float unit = S.unit;
            float gain = 1.f, step[2], most = unit;
            if (read != bits) gain = scale16(*(const u16*)(record + GAIN_AT + 2 * ((warp * HKV + h) * 2 + index_of(read)))) * (float)(1 << (bits - read));
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                step[i] = 2 * lane + i < e.rows ? gain * scale16(S.raw_scales[warp][2 * lane + i]) : 0.f;
                most = fmaxf(most, step[i]);
            }
            if (warp == 1) {
                #pragma unroll
                for (int z = 1; z < 32; z *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, z));
                if (lane == 0) { S.unit = most; S.down = most == unit ? 1.f : __fdividef(unit, most); }
            }
            const float by = warp ? __fdividef(32768.f, most) : P.kappa[h * 9 + 3 * index_of(bits) + index_of(read)];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = place_of(2 * lane + i);
                const float base = 2 * lane + i < e.rows ? fmaf(-half, step[i], bf16(S.raw_mids[warp][2 * lane + i])) : 0.f;
                if (warp) { S.step_v[at] = step[i] * by; S.base_v[at] = base; }
                else { S.step_k[at] = step[i]; S.base_k[at] = base; S.noise[at] = by * step[i] * step[i]; }
            }
        }
        __syncthreads();
        const int after = next(j + 1);
        send(after);

        // Centers of eight pages at a time, a page a column; their bytes plus 128.
        float center[2] = {0.f, 0.f};
        if (CENTERED) {
            if (centered != j / 8) {
                centered = j / 8;
                const u8* from = P.records + (i64)entries[min(j / 8 * 8 + r, n_entries - 1)].id * RECORD_BYTES + CENTER_AT + h * D + c * (D / 4);
                float found[4] = {};
                #pragma unroll 2
                for (int s = 0; s < KS; s++) {
                    const u32 w = *(const u32*)(from + 4 * s) ^ 0x80808080u;
                    #pragma unroll
                    for (int z = 0; z < PARTS; z++) {
                        const uint4 q = S.q[z][warp][s][lane];
                        mma_f16(found, q.x, q.y, q.z, q.w, low_codes(w), high_codes(w));
                    }
                }
                #pragma unroll
                for (int x = 0; x < 4; x++) S.centers[warp][2 * c + (x & 1)][r + 8 * (x >> 1)] = found[x];
                __syncwarp();
            }
            const float scale = scale16(*(const u16*)(record + CENTER_SCALE_AT + 2 * h));
            #pragma unroll
            for (int i = 0; i < 2; i++) center[i] = scale * fmaf(-128.f, total[i], S.centers[warp][j & 7][r + 8 * i]);
        }

        float s[8][4] = {};
        #pragma unroll
        for (int k = 0; k < KQ; k++)
            #pragma unroll
            for (int z = 0; z < PARTS; z++) {
                uint4 q[4];
                #pragma unroll
                for (int x = 0; x < 4; x++) if (4 * k + x < KS) q[x] = S.q[z][warp][4 * k + x][lane];
                #pragma unroll
                for (int n = 0; n < 8; n++) {
                    const uint4 w = S.k[n][k][lane];
                    const u32 words[4] = {w.x, w.y, w.z, w.w};
                    #pragma unroll
                    for (int x = 0; x < 4; x++)
                        if (4 * k + x < KS) mma_f16(s[n], q[x].x, q[x].y, q[x].z, q[x].w, low_codes(words[x]), high_codes(words[x]));
                }
            }
        #pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 step = *(const float2*)&S.step_k[8 * n + 2 * c], base = *(const float2*)&S.base_k[8 * n + 2 * c], noise = *(const float2*)&S.noise[8 * n + 2 * c];
            #pragma unroll
            for (int x = 0; x < 4; x++) {
                float y = fmaf(s[n][x], x & 1 ? step.y : step.x, center[x >> 1]);
                y = fmaf(total[x >> 1], x & 1 ? base.y : base.x, y);
                y = fmaf(-energy[x >> 1], x & 1 ? noise.y : noise.x, y);
                s[n][x] = CAPPED ? capped(y * up[x >> 1], P.softcap) : y;
            }
        }
        const bool windowed = e.slot >= 0 && in_window(e.start, oldest, P.sink, P.recent);
        if (e.rows < 64 || windowed) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const int seen = windowed && in_window(e.start, chunk + min(row0 + 8 * i, n_rows - 1) / G, P.sink, P.recent) ? 0 : e.rows;
                #pragma unroll
                for (int n = 0; n < 8; n++)
                    #pragma unroll
                    for (int x = 0; x < 2; x++)
                        if (8 * (n & ~1) + 4 * c + 2 * (n & 1) + x >= seen) s[n][2 * i + x] = NONE;
            }
        }
        float keep[2];
        const float ups[2] = {CAPPED ? 1.f : up[0], CAPPED ? 1.f : up[1]}, down = S.down;
        const bool higher = R.weigh(s, ups, keep);
        if (higher || down != 1.f) R.scale(keep[0] * down, keep[1] * down);
        u32 p[PARTS][4][4];
        offset[0] *= keep[0];
        offset[1] *= keep[1];
        #pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 step = *(const float2*)&S.step_v[8 * n + 2 * c], base = *(const float2*)&S.base_v[8 * n + 2 * c];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                offset[i] = fmaf(s[n][2 * i], base.x, fmaf(s[n][2 * i + 1], base.y, offset[i]));
                float w[2] = {s[n][2 * i] * step.x, s[n][2 * i + 1] * step.y};
                #pragma unroll
                for (int z = 0; z < PARTS; z++) p[z][n >> 1][2 * (n & 1) + i] = split_pair(w);
            }
        }
        #pragma unroll
        for (int t = 0; t < OT; t++) {
            const uint4 w = S.v[t][lane];
            const u32 words[4] = {w.x, w.y, w.z, w.w};
            #pragma unroll
            for (int x = 0; x < 4; x++)
                #pragma unroll
                for (int z = 0; z < PARTS; z++) mma_f16(R.o[t], p[z][x][0], p[z][x][1], p[z][x][2], p[z][x][3], low_codes(words[x]), high_codes(words[x]));
        }
        j = after;
    }
    __syncthreads();
    const float unit_v = S.unit * 512.f;
    const i64 split_at = (i64)split * HKV * G * P.total;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const float mass = sum_quad(R.l[i]), share = mass > 0.f ? 1.f / mass : 0.f, shift = sum_quad(offset[i]);
        if (row0 + 8 * i >= n_rows) continue;
        const i64 at = split_at + at_of(i);
        #pragma unroll
        for (int t = 0; t < OT; t++)
            #pragma unroll
            for (int x = 0; x < 2; x++) {
                const int number = 8 * t + 2 * c + x, plane = number / KS / 4, byte = number / KS % 4;
                P.out[at * D + plane * (D / 4) + 4 * (number % KS) + byte] = mass > 0.f ? fmaf(R.o[t][2 * i + x], unit_v, shift) * share : 0.f;
            }
        if (c == 0) P.lse[at] = R.lse(i, CAPPED ? 1.f : up[i], mass);
    }
}
