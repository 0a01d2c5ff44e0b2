// Exact rows of pages and of the chunk itself; second part of the source of prefill.cu.

#define SIDES (KIND == 0 ? 2 : 1)          // a float32 number is two bfloat16
#define BLOCK (KIND == 0 ? 32 : 64)        // rows at a time
struct Exact {
    uint4 q[SIDES][WARPS][KS][32];
    uint2 k[SIDES][BLOCK / 8][KS][32], v[SIDES][OT][BLOCK / 16][32];
};
struct ExactParams {
    const void *q, *rows, *k, *v;  // [HKV G, all, D], [E, 2, HKV, 64, D], [HKV, all, D] twice; k is null to leave it out
    i64 of_q[2], of_k[2], of_v[2]; // strides in numbers
    const int4* entries;           // [B, width]
    const int *counts, *lengths, *starts;
    float *out, *lse;              // [HKV G, total, D], [HKV G, total]
    int width, total, first, count, sink, recent;
    float scale, softcap;
};
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if KIND == 2
    mma_f16(c, a0, a1, a2, a3, b0, b1);
#else
    mma_bf16(c, a0, a1, a2, a3, b0, b1);
#endif
}
// Two numbers in the dtype of the products, and what that leaves of them.
DEVICE void pair_of(float x, float y, u32 (&to)[SIDES]) {
#if KIND == 2
    to[0] = to_f16_pair(x, y);
#else
    to[0] = to_bf16_pair(x, y);
#endif
    if constexpr (SIDES == 2) to[SIDES - 1] = to_bf16_pair(x - bf16(to[0]), y - as_float(to[0] & 0xffff0000u));
}
DEVICE void pair_at(const void* rows, i64 i, u32 (&to)[SIDES]) {
#if KIND == 0
    const float2 x = ((const float2*)rows)[i / 2];
    pair_of(x.x, x.y, to);
#else
    to[0] = ((const u32*)rows)[i / 2];
#endif
}

// Rows in memory -> operands. Product s, lane c of a quad has channels 16 s + 4 c + 0..3 of K.
DEVICE void stage(Exact& S, const void* k, i64 k_at, i64 k_step, const void* v, i64 v_at, i64 v_step, int n) {
    for (int x = threadIdx.x; x < BLOCK / 8 * KS * 32; x += THREADS) {
        const int lane = x % 32, s = x / 32 % KS, tile = x / 32 / KS, t = 8 * tile + (lane >> 2);
        u32 a[SIDES] = {}, b[SIDES] = {};
        if (t < n) {
            pair_at(k, k_at + t * k_step + 16 * s + 4 * (lane & 3), a);
            pair_at(k, k_at + t * k_step + 16 * s + 4 * (lane & 3) + 2, b);
        }
        #pragma unroll
        for (int z = 0; z < SIDES; z++) S.k[z][tile][s][lane] = make_uint2(a[z], b[z]);
    }
    for (int x = threadIdx.x; x < OT * (BLOCK / 16) * 16; x += THREADS) {
        const int half = x % 4, c = x / 4 % 4, tile = x / 16 % OT, s = x / 16 / OT;
        u32 w[4][SIDES] = {};  // tokens 2 c + {0, 1, 8, 9}, of two channels; rows that were never written may hold NaN
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            const int t = 16 * s + 2 * c + (e & 1) + 8 * (e >> 1);
            if (t < n) pair_at(v, v_at + t * v_step + 8 * tile + 2 * half, w[e]);
        }
        #pragma unroll
        for (int z = 0; z < SIDES; z++) {
            S.v[z][tile][s][8 * half + c] = make_uint2(__byte_perm(w[0][z], w[1][z], 0x5410), __byte_perm(w[2][z], w[3][z], 0x5410));
            S.v[z][tile][s][8 * half + 4 + c] = make_uint2(__byte_perm(w[0][z], w[1][z], 0x7632), __byte_perm(w[2][z], w[3][z], 0x7632));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) lamina_exact(const __grid_constant__ ExactParams P) {
    DYNAMIC_SHARED(uint4, shared);
    Exact& S = *(Exact*)shared;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2, c = lane & 3, tile = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int start = P.starts[b], tokens = P.starts[b + 1] - start, count = min(P.count, tokens - P.first), n_rows = count * G;
    if (tile * TILE >= n_rows) return;
    const int row0 = tile * TILE + 16 * warp + r, before = P.lengths[b] - tokens;
    const int oldest = P.first + tile * TILE / G, newest = P.first + min(count - 1, (tile * TILE + TILE - 1) / G);
    int token[2];  // of the chunk
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = min(row0 + 8 * i, n_rows - 1);
        token[i] = P.first + row / G;
        const i64 at = (h * G + row % G) * P.of_q[0] + (start + token[i]) * P.of_q[1] + 4 * c;
        #pragma unroll 4
        for (int s = 0; s < KS; s++)
            #pragma unroll
            for (int e = 0; e < 4; e += 2) {
                u32 x[SIDES];
                pair_at(P.q, at + 16 * s + e, x);
                #pragma unroll
                for (int z = 0; z < SIDES; z++) ((u32*)&S.q[z][warp][s][lane])[e + i] = x[z];
            }
    }
    Rows R;
    const float ups[2] = {CAPPED ? 1.f : P.scale, CAPPED ? 1.f : P.scale};
    // Rows that are staged: row i sees the first seen[i] of them.
    const auto attend = [&](const int (&seen)[2]) {
        float s[BLOCK / 8][4] = {};
        #pragma unroll 2
        for (int k = 0; k < KS; k++) {
            uint4 q[SIDES];
            #pragma unroll
            for (int z = 0; z < SIDES; z++) q[z] = S.q[z][warp][k][lane];
            #pragma unroll
            for (int n = 0; n < BLOCK / 8; n++)
                #pragma unroll
                for (int z = 0; z < (SIDES == 2 ? 3 : 1); z++) {  // but for the product of both small parts
                    const uint4& a = q[z == 1 ? SIDES - 1 : 0];
                    const uint2 w = S.k[z == 2 ? SIDES - 1 : 0][n][k][lane];
                    mma(s[n], a.x, a.y, a.z, a.w, w.x, w.y);
                }
        }
        #pragma unroll
        for (int n = 0; n < BLOCK / 8; n++)
            #pragma unroll
            for (int x = 0; x < 4; x++) {
                if (CAPPED) s[n][x] = capped(s[n][x] * P.scale, P.softcap);
                if (8 * n + 2 * c + (x & 1) >= seen[x >> 1]) s[n][x] = NONE;
            }
        float keep[2];
        if (R.weigh(s, ups, keep)) R.scale(keep[0], keep[1]);
        u32 p[BLOCK / 16][4][SIDES];
        #pragma unroll
        for (int n = 0; n < BLOCK / 8; n++)
            #pragma unroll
            for (int i = 0; i < 2; i++) pair_of(s[n][2 * i], s[n][2 * i + 1], p[n >> 1][2 * (n & 1) + i]);
        #pragma unroll
        for (int t = 0; t < OT; t++)
            #pragma unroll
            for (int k = 0; k < BLOCK / 16; k++)
                #pragma unroll
                for (int z = 0; z < (SIDES == 2 ? 3 : 1); z++) {
                    const int a = z == 1 ? SIDES - 1 : 0;
                    const uint2 w = S.v[z == 2 ? SIDES - 1 : 0][t][k][lane];
                    mma(R.o[t], p[k][0][a], p[k][1][a], p[k][2][a], p[k][3][a], w.x, w.y);
                }
    };
    const int4* entries = P.entries + (i64)b * P.width;
    const int n_pages = P.counts[2 * b + 1];
    for (int j = 0; j < n_pages; j++) {
        const int4 e = entries[j];  // slot, start, rows, whether all read it
        if (!e.w && !in_window(e.y, before + oldest, P.sink, P.recent)) continue;
        const i64 at = ((i64)e.x * 2 * HKV + h) * 64 * D;
        for (int from = 0; from < e.z; from += BLOCK) {
            __syncthreads();
            stage(S, P.rows, at + from * D, D, P.rows, at + (HKV * 64 + from) * D, D, e.z - from);
            __syncthreads();
            int seen[2];
            #pragma unroll
            for (int i = 0; i < 2; i++) seen[i] = e.w || in_window(e.y, before + token[i], P.sink, P.recent) ? e.z - from : 0;
            attend(seen);
        }
    }
    if (P.k) {
        const i64 k_at = h * P.of_k[0] + start * P.of_k[1], v_at = h * P.of_v[0] + start * P.of_v[1];
        for (int from = 0; from <= newest; from += BLOCK) {
            __syncthreads();
            stage(S, P.k, k_at + from * P.of_k[1], P.of_k[1], P.v, v_at + from * P.of_v[1], P.of_v[1], tokens - from);
            __syncthreads();
            const int seen[2] = {token[0] + 1 - from, token[1] + 1 - from};
            attend(seen);
        }
    }
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = row0 + 8 * i;
        const float mass = sum_quad(R.l[i]), share = mass > 0.f ? 1.f / mass : 0.f;
        if (row >= n_rows) continue;
        const i64 at = (i64)(h * G + row % G) * P.total + start + row / G;
        #pragma unroll
        for (int t = 0; t < OT; t++) *(float2*)(P.out + at * D + 8 * t + 2 * c) = make_float2(R.o[t][2 * i] * share, R.o[t][2 * i + 1] * share);
        if (c == 0) P.lse[at] = R.lse(i, ups[i], mass);
    }
}
