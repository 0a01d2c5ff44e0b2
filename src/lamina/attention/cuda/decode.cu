// Decode attention over packed pages, for NVIDIA GPUs from compute capability 8.0 on.
//
// Compiled at run time for one geometry: D (head dimension), G (query heads a KV head), NT (tiles of 8 query columns, a
// column being one query token and head), HKV (KV heads), KIND (dtype of exact rows: 0 float32, 1 bfloat16, 2 float16).
//
// One warp reads one page of 64 tokens at a time, straight from memory into the registers that the tensor cores take it
// from. A code of a plane is turned into a number by one AND on two codes at once: the bits that are left, read as
// float16, are a subnormal number, x 4^p 2^-24 for a code x at bit 2p of its byte, which the tensor cores multiply
// exactly. So keys need no conversion and no shift; 4^-p is in the query, 2^24 in the page's scale.
//   logits^T [tokens, columns] = K [tokens, D] q^T:  A = codes, rows are tokens; B = queries, in registers throughout
//   o'^T    [D, columns]       = V^T [D, tokens] p^T: A = codes of two tokens, merged by a byte permutation
// Which channel or token a place in a fragment stands for is free as long as both operands agree, and is chosen such
// that loads are whole sectors, a thread's eight tokens are neighbours, and planes need no shuffles.
// Bound by memory at 2 bits; by the issue of about 600 instructions a page and plane before that on slower memories.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define NW (D / 16)
#define KW ((NW + 3) / 4)
#define VW ((NW + 7) / 8)
#define NCOL (8 * NT)
#define WARPS 4
#define SLOTS 4
#define BLOCKS (NT * D > 128 ? 2 : 3)
#define NEVER (-1e30f)
#define COLUMNS 11
#define SLAB_BYTES (HKV * 16 * D)
#define SCALE_AT (2 * SLAB_BYTES)
#define MID_AT (SCALE_AT + 256 * HKV)
#define CENTER_AT (MID_AT + 256 * HKV)
#define GAIN_AT (CENTER_AT + (CENTERED ? HKV * D : 0))
#define CENTER_SCALE_AT (GAIN_AT + 8 * HKV)
#define RECORD_BYTES ((CENTER_SCALE_AT + (CENTERED ? 2 * HKV : 0) + 15) / 16 * 16)

struct Params {
    const u16* q;            // [B, HKV, NCOL, D] float16: q' * scaling * log2(e), each row scaled to at most 4096
    const float* q_meta;     // [B, HKV, NCOL, 4]: factor that undoes the row's scaling, sum of q', energy, unused
    const float* q_exact;    // [B, HKV, NCOL, D]: q * scaling * log2(e)
    const u8* records;       // [N, RECORD_BYTES]
    const u8* slabs;         // [M, HKV, 64, D/4]
    const void* exact;       // [E, 2, HKV, 64, D]
    const int* table;        // [N, COLUMNS]
    const int* page_ids;     // [B, width]
    const int* lengths;      // [B]
    const float* kappa;      // [HKV, 3, 3]
    float* partial;          // [splits + 1, B, HKV, NCOL, D + 2]: values, maximum, mass; the last split is of exact rows
    int width, splits, tokens, sink, recent;
    float softcap;           // in units of log2(e), 0 for none
};

__device__ __forceinline__ float as_float(u32 x) { return __uint_as_float(x); }
__device__ __forceinline__ float scale16(u32 x) { return as_float((x & 0xffffu) << 15); }
__device__ __forceinline__ float bf16(u32 x) { return as_float(x << 16); }
__device__ __forceinline__ float exp2_(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 half2_(float lo, float hi) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) { u32 y; asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
__device__ __forceinline__ u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float max_rows(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}
__device__ __forceinline__ float sum_rows(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}
__device__ __forceinline__ float capped(float x, float cap) {
    if (cap == 0.f) return x;
    float e = exp2_(x / cap * 2.8853900817779268f);
    return cap * (1.f - 2.f / (e + 1.f));
}

// Slabs travel through shared memory, a ring of slots a warp, SLOTS - 1 of them in flight. Rows are stored there in an order
// in which a warp's reads meet no bank twice, where a row is a whole number of 16-byte pieces.
#define ROW (D / 4)
#define SORTED (ROW % 16 == 0)
#define HEADER (512 + D)
#define SLOT (16 * D + HEADER)
__device__ __forceinline__ int k_place(int t) { return SORTED ? (t & 7) * 8 + (t >> 3) : t; }
__device__ __forceinline__ int v_place(int t) { return SORTED ? (t & 15) * 4 + (t >> 4) : t; }
__device__ __forceinline__ void copy_16(u8* to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
// Words that this thread's fragments of K take: rows 8r + 0..7, KW words each.
struct KRows { u32 w[8][KW]; };
__device__ __forceinline__ void read_k(KRows& x, const u8* slot, int r, int c) {
    #pragma unroll
    for (int e = 0; e < 8; e++) {
        const u32* row = (const u32*)(slot + k_place(8 * r + e) * ROW) + c * KW;
        if (NW == 4 * KW && KW == 2) { uint2 y = *(const uint2*)row; x.w[e][0] = y.x; x.w[e][KW - 1] = y.y; }
        else {
            #pragma unroll
            for (int k = 0; k < KW; k++) x.w[e][k] = c * KW + k < NW ? row[k] : 0;
        }
    }
}
// Of V: word r * VW + k of rows 16c + 2i + h + {0, 8}.
struct VRows { u32 w[4][2][2][VW]; };
__device__ __forceinline__ void read_v_rows(VRows& x, const u8* slot, int r, int c) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++)
            #pragma unroll
            for (int u = 0; u < 2; u++) {
                const u32* row = (const u32*)(slot + v_place(16 * c + 2 * i + h + 8 * u) * ROW) + r * VW;
                #pragma unroll
                for (int k = 0; k < VW; k++) x.w[i][h][u][k] = r * VW + k < NW ? row[k] : 0;
            }
}

// What a warp will read next: the planes of K, then those of V, of one page after the other.
struct Feed {
    const Params& P;
    u8* ring;
    int h, lane;
    int page, planes, fine_k, fine_v, f0k, f1k, f0v, f1v;  // of the lane's page; planes: of K, and of V << 4
    u32 todo;
    int at, next, slot;

    __device__ __forceinline__ void issue() {
        if (todo) {
            const int counts = __shfl_sync(~0u, planes, at), nk = counts & 15, nv = counts >> 4;
            const bool v = next >= nk;
            const int z = v ? next - nk : next;
            const u8* from;
            u8* to = ring + slot * SLOT;
            if (z == 0) {
                const u8* record = P.records + (i64)__shfl_sync(~0u, page, at) * RECORD_BYTES;
                from = record + (v ? SLAB_BYTES : 0) + h * 16 * D;
                if (!v) {
                    const int field = lane >> 3, piece = (lane & 7) * 16;
                    const int place = (field < 2 ? SCALE_AT : MID_AT) + ((field & 1) * HKV + h) * 128;
                    copy_16(to + 16 * D + field * 128 + piece, record + place + piece);
                    if (CENTERED && lane < D / 16) copy_16(to + 16 * D + 512 + lane * 16, record + CENTER_AT + h * D + lane * 16);
                }
            } else {
                const int s = z == 1 ? (v ? fine_v : fine_k) : z == 2 ? (v ? f1v : f1k) : (v ? f0v : f0k);
                from = P.slabs + (i64)__shfl_sync(~0u, s, at) * SLAB_BYTES + h * 16 * D;
            }
            #pragma unroll
            for (int m = 0; m < (D + 31) / 32; m++) {
                const int q = lane + 32 * m;
                if (D % 32 == 0 || q < D) {
                    const int row = q * 16 / ROW, in = q * 16 % ROW;
                    copy_16(to + (SORTED ? (v ? v_place(row) : k_place(row)) * ROW + in : q * 16), from + q * 16);
                }
            }
            if (++next == nk + nv) { next = 0; todo &= todo - 1; at = __ffs(todo) - 1; }
        }
        asm volatile("cp.async.commit_group;");
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
};

// acc += codes of a plane times queries; NIBBLE is -1 for a plane of pairs, else the slab's number.
template <int NIBBLE>
__device__ __forceinline__ void dot_k(float (&acc)[NT][4][4], const KRows& x, const u32 (&bq)[NT][KW][2][2][2]) {
    #pragma unroll
    for (int k = 0; k < KW; k++)
        #pragma unroll
        for (int s = 0; s < 2; s++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 a = s ? x.w[2 * i][k] >> 8 : x.w[2 * i][k], b = s ? x.w[2 * i + 1][k] >> 8 : x.w[2 * i + 1][k];
                #pragma unroll
                for (int z = 0; z < 2; z++) {
                    if (NIBBLE >= 0 && NIBBLE != z) continue;
                    const u32 low = NIBBLE >= 0 ? 0x000f000fu : 0x00030003u << (2 * z);
                    const u32 high = NIBBLE >= 0 ? 0x00f000f0u : 0x00300030u << (2 * z);
                    #pragma unroll
                    for (int n = 0; n < NT; n++)
                        mma(acc[n][i], a & low, b & low, a & high, b & high, bq[n][k][s][z][0], bq[n][k][s][z][1]);
                }
            }
}
template <int NIBBLE>
__device__ __forceinline__ void dot_v(float (&o)[NT][VW][8][4], const VRows& x, const u32 (&p)[NT][4][2]) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int k = 0; k < VW; k++)
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 a = __byte_perm(x.w[i][0][0][k], x.w[i][0][1][k], j * 0x11 + (4 + j) * 0x1100);
                u32 b = __byte_perm(x.w[i][1][0][k], x.w[i][1][1][k], j * 0x11 + (4 + j) * 0x1100);
                #pragma unroll
                for (int z = 0; z < 2; z++) {
                    if (NIBBLE >= 0 && NIBBLE != z) continue;
                    const u32 low = NIBBLE >= 0 ? 0x000f000fu : 0x00030003u << (2 * z);
                    const u32 high = NIBBLE >= 0 ? 0x00f000f0u : 0x00300030u << (2 * z);
                    #pragma unroll
                    for (int n = 0; n < NT; n++)
                        mma(o[n][k][2 * j + z], a & low, a & high, b & low, b & high, p[n][i][0], p[n][i][1]);
                }
            }
}
__device__ __forceinline__ void quadruple(float (&acc)[NT][4][4]) {
    #pragma unroll
    for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) acc[n][i][e] *= 4.f;
}
__device__ __forceinline__ void scaled(u32 (&y)[NT][4][2], const u32 (&p)[NT][4][2], u32 factor) {
    #pragma unroll
    for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) { y[n][i][0] = times(p[n][i][0], factor); y[n][i][1] = times(p[n][i][1], factor); }
}
__device__ __forceinline__ u16 u16_of(const uint4& x, int e) {
    u32 w = e < 2 ? x.x : e < 4 ? x.y : e < 6 ? x.z : x.w;
    return e & 1 ? w >> 16 : w & 0xffff;
}
__device__ __forceinline__ int index_of(int bits) { return bits == 2 ? 0 : bits == 4 ? 1 : 2; }

struct Smem {
    float m[WARPS][NCOL], l[WARPS][NCOL];
    float o[WARPS][NCOL][D];
};

__device__ void attend_packed(const Params& P, Smem& S, u8* rings, int split, int h, int b) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2, c = lane & 3;
    u8* ring = rings + warp * SLOTS * SLOT;
    const i64 row0 = ((i64)b * HKV + h) * NCOL;
    u32 bq[NT][KW][2][2][2];
    float total[NT][2], energy[NT][2], unit[NT][2], m[NT][2], l[NT][2], off[NT][2];
    int position[NT][2];
    const int length = P.lengths[b];
    #pragma unroll
    for (int n = 0; n < NT; n++) {
        const u16* q = P.q + (row0 + 8 * n + r) * D;
        #pragma unroll
        for (int k = 0; k < KW; k++)
            #pragma unroll
            for (int s = 0; s < 2; s++)
                #pragma unroll
                for (int z = 0; z < 2; z++)
                    #pragma unroll
                    for (int x = 0; x < 2; x++) {
                        const int w = c * KW + k, p = z + 2 * x, at = p * (D / 4) + 4 * w + s;
                        const u32 pair = w < NW ? (u32)q[at] | (u32)q[at + 2] << 16 : 0;
                        const u32 down = p == 0 ? 0x3c003c00u : p == 1 ? 0x34003400u : p == 2 ? 0x2c002c00u : 0x24002400u;
                        bq[n][k][s][z][x] = times(pair, down);
                    }
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            const int col = 8 * n + 2 * c + e;
            const float* meta = P.q_meta + (row0 + col) * 4;
            unit[n][e] = 16777216.f * meta[0]; total[n][e] = meta[1]; energy[n][e] = meta[2];
            m[n][e] = NEVER; l[n][e] = off[n][e] = 0.f;
            const int token = col / G;
            position[n][e] = token < P.tokens ? length - P.tokens + token : -1;
        }
    }
    float o[NT][VW][8][4];
    #pragma unroll
    for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int k = 0; k < VW; k++)
            #pragma unroll
            for (int j = 0; j < 8; j++)
                #pragma unroll
                for (int e = 0; e < 4; e++) o[n][k][j][e] = 0.f;
    float v_unit = 0.f;

    // Pages that some query of this call reads packed, dealt out to splits and warps.
    const int newest = length - 1, oldest = length - P.tokens;
    const int n_pages = P.width;
    const int first = (int)((i64)n_pages * split / P.splits), last = (int)((i64)n_pages * (split + 1) / P.splits);
    for (int j0 = first + warp; j0 < last; j0 += WARPS * 32) {
        // What the table says of this warp's next 32 pages, one a lane.
        const int mine = j0 + WARPS * lane;
        int start = 0, rows = 0, tiers = 0;
        Feed feed{P, ring, h, lane, -1, 0x11, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0};
        if (mine < last) feed.page = P.page_ids[(i64)b * P.width + mine];
        if (feed.page >= 0) {
            const int* t = P.table + (i64)feed.page * COLUMNS;
            start = t[0]; rows = t[1]; tiers = t[2] | t[3] << 8;
            feed.fine_k = t[4]; feed.fine_v = t[5]; feed.f0k = t[6]; feed.f1k = t[7]; feed.f0v = t[8]; feed.f1v = t[9];
            feed.planes = (1 + (t[4] >= 0) + 2 * (t[6] >= 0)) | (1 + (t[5] >= 0) + 2 * (t[8] >= 0)) << 4;
            const int slot = t[10];
            const bool exact = t[2] == 0 || (slot >= 0 && (start < P.sink || start >= oldest / 64 * 64 - P.recent));
            const bool exact_for_all = t[2] == 0 || (slot >= 0 && (start < P.sink || start >= newest / 64 * 64 - P.recent));
            if ((exact && exact_for_all) || start > newest) feed.page = -1;
            if (slot >= 0) tiers |= 1 << 16;
        }
        u32 todo = __ballot_sync(~0u, feed.page >= 0);
        feed.todo = todo;
        feed.at = __ffs(todo) - 1;
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < SLOTS - 1; i++) feed.issue();
        int slot = 0;
        // The next slab is there; one more is sent for.
        auto arrived = [&]() -> const u8* {
            asm volatile("cp.async.wait_group %0;" :: "n"(SLOTS - 2));
            __syncwarp();
            feed.issue();
            const u8* found = ring + slot * SLOT;
            slot = slot + 1 == SLOTS ? 0 : slot + 1;
            return found;
        };
        for (; todo; todo &= todo - 1) {
            const int at = __ffs(todo) - 1;
            const u8* rec = P.records + (i64)__shfl_sync(~0u, feed.page, at) * RECORD_BYTES;
            const int counts = __shfl_sync(~0u, feed.planes, at), nk = counts & 15, nv = counts >> 4;
            const u8* here = arrived();
            const u8* header = here + 16 * D;
            const uint4 k_scales = *(const uint4*)(header + 16 * r), v_scales = *(const uint4*)(header + 128 + 16 * r);
            const uint4 k_mids = *(const uint4*)(header + 256 + 16 * r), v_mids = *(const uint4*)(header + 384 + 16 * r);
            KRows k_base;
            read_k(k_base, here, r, c);
            const int kinds = __shfl_sync(~0u, tiers, at), from = __shfl_sync(~0u, start, at), n_rows = __shfl_sync(~0u, rows, at);
            const int bits_k = kinds & 255, bits_v = kinds >> 8 & 255;
            float acc[NT][4][4];
            #pragma unroll
            for (int n = 0; n < NT; n++)
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    #pragma unroll
                    for (int e = 0; e < 4; e++) acc[n][i][e] = 0.f;
            dot_k<-1>(acc, k_base, bq);
            float from_center[NT][2];
            #pragma unroll
            for (int n = 0; n < NT; n++) from_center[n][0] = from_center[n][1] = 0.f;
#if CENTERED
            {
                // The center as one more row of numbers -128..127, in row 0 of an otherwise empty tile.
                const u8* center = header + 512;
                float dots[NT][4];
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    #pragma unroll
                    for (int e = 0; e < 4; e++) dots[n][e] = 0.f;
                #pragma unroll
                for (int k = 0; k < KW; k++)
                    #pragma unroll
                    for (int p = 0; p < 2; p++) {
                        u32 w0 = 0, w1 = 0;
                        if (r == 0 && c * KW + k < NW) {
                            w0 = *(const u32*)(center + p * (D / 4) + 4 * (c * KW + k)) ^ 0x80808080u;
                            w1 = *(const u32*)(center + (p + 2) * (D / 4) + 4 * (c * KW + k)) ^ 0x80808080u;
                        } else { w0 = w1 = 0x80808080u; }
                        #pragma unroll
                        for (int s = 0; s < 2; s++) {
                            // 0x6400 | x is 1024 + x: minus 1152 it is the signed number, times 4^p as queries carry 4^-p.
                            u32 a0 = (w0 >> (8 * s) & 0x00ff00ffu) | 0x64006400u, a2 = (w1 >> (8 * s) & 0x00ff00ffu) | 0x64006400u;
                            asm("sub.f16x2 %0, %0, %1;" : "+r"(a0) : "r"(0x64806480u));
                            asm("sub.f16x2 %0, %0, %1;" : "+r"(a2) : "r"(0x64806480u));
                            a0 = times(a0, p ? 0x44004400u : 0x3c003c00u);
                            a2 = times(a2, p ? 0x54005400u : 0x4c004c00u);
                            #pragma unroll
                            for (int n = 0; n < NT; n++) mma(dots[n], a0, 0, a2, 0, bq[n][k][s][p][0], bq[n][k][s][p][1]);
                        }
                    }
                const float c_scale = scale16(*(const u16*)(rec + CENTER_SCALE_AT + 2 * h));
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    #pragma unroll
                    for (int e = 0; e < 2; e++)
                        from_center[n][e] = c_scale * (unit[n][e] / 16777216.f) * __shfl_sync(~0u, dots[n][e], c);
            }
#endif
            const int read = nk == 1 ? 2 : nk == 2 ? 4 : 8;
            if (nk >= 2) {
                read_k(k_base, arrived(), r, c);
                quadruple(acc);
                dot_k<-1>(acc, k_base, bq);
            }
            if (nk == 4) {
                read_k(k_base, arrived(), r, c);
                quadruple(acc);
                dot_k<1>(acc, k_base, bq);
                read_k(k_base, arrived(), r, c);
                quadruple(acc);
                dot_k<0>(acc, k_base, bq);
            }
            float gain = 1.f;
            if (read != bits_k)
                gain = scale16(*(const u16*)(rec + GAIN_AT + 4 * h + 2 * index_of(read))) * (float)(1 << (bits_k - read));
            const float half = 0.5f * (float)((1 << read) - 1);
            const float noise = P.kappa[h * 9 + 3 * index_of(bits_k) + index_of(read)];
            bool whole = n_rows == 64 && from + 63 <= oldest && !(kinds >> 16);
            float top[NT][2];
            #pragma unroll
            for (int n = 0; n < NT; n++) {
                top[n][0] = top[n][1] = NEVER;
                #pragma unroll
                for (int x = 0; x < 8; x++) {
                    const float step = scale16(u16_of(k_scales, x)) * gain, mid = bf16(u16_of(k_mids, x));
                    const float zero = mid - step * half, loss = noise * step * step;
                    #pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& y = acc[n][x >> 1][2 * (x & 1) + e];
                        float s = fmaf(step * unit[n][e], y, fmaf(zero, total[n][e], fmaf(-loss, energy[n][e], from_center[n][e])));
#if CAPPED
                        s = capped(s, P.softcap);
#endif
                        if (!whole) {
                            const int t = position[n][e];
                            const bool exact = kinds >> 16 && (from < P.sink || from >= t / 64 * 64 - P.recent);
                            if (8 * r + x >= n_rows || from + 8 * r + x > t || exact) s = NEVER;
                        }
                        y = s;
                        top[n][e] = fmaxf(top[n][e], s);
                    }
                }
            }
            bool higher = false;
            #pragma unroll
            for (int n = 0; n < NT; n++) higher = higher || top[n][0] > m[n][0] + 4.f || top[n][1] > m[n][1] + 4.f;
            if (__any_sync(~0u, higher)) {
                #pragma unroll
                for (int n = 0; n < NT; n++) {
                    float keep[2];
                    #pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float now = fmaxf(m[n][e], max_rows(top[n][e]));
                        keep[e] = exp2_(m[n][e] - now);
                        m[n][e] = now;
                        l[n][e] *= keep[e];
                        off[n][e] *= keep[e];
                    }
                    #pragma unroll
                    for (int k = 0; k < VW; k++)
                        #pragma unroll
                        for (int j = 0; j < 8; j++)
                            #pragma unroll
                            for (int e = 0; e < 4; e++) o[n][k][j][e] *= keep[e & 1];
                }
            }

            const int read_v = nv == 1 ? 2 : nv == 2 ? 4 : 8;
            gain = 1.f;
            if (read_v != bits_v)
                gain = scale16(*(const u16*)(rec + GAIN_AT + 4 * (HKV + h) + 2 * index_of(read_v))) * (float)(1 << (bits_v - read_v));
            const float half_v = 0.5f * (float)((1 << read_v) - 1);
            float largest = 0.f;
            #pragma unroll
            for (int x = 0; x < 8; x++) largest = fmaxf(largest, scale16(u16_of(v_scales, x)) * gain);
            if (__any_sync(~0u, largest * v_unit > 8.f || (v_unit == 0.f && largest > 0.f))) {
                const u32 exponent = __float_as_uint(max_rows(largest)) & 0x7f800000u;
                const float fresh = as_float(0x7f000000u - min(exponent, 0x7e000000u));
                const float change = v_unit == 0.f ? 1.f : fresh / v_unit;
                v_unit = fresh;
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    #pragma unroll
                    for (int k = 0; k < VW; k++)
                        #pragma unroll
                        for (int j = 0; j < 8; j++)
                            #pragma unroll
                            for (int e = 0; e < 4; e++) o[n][k][j][e] *= change;
            }
            u32 p[NT][4][2];
            #pragma unroll
            for (int n = 0; n < NT; n++)
                #pragma unroll
                for (int x = 0; x < 8; x++) {
                    const float step = scale16(u16_of(v_scales, x)) * gain, zero = bf16(u16_of(v_mids, x)) - step * half_v;
                    float w[2];
                    #pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float s = acc[n][x >> 1][2 * (x & 1) + e];
                        const float y = s == NEVER ? 0.f : exp2_(s - m[n][e]);
                        l[n][e] += y;
                        off[n][e] += y * zero;
                        w[e] = y * step * v_unit;
                    }
                    p[n][x >> 1][x & 1] = transposed(half2_(w[0], w[1]));
                }
            VRows x;
            read_v_rows(x, arrived(), r, c);
            if (nv == 1) {
                dot_v<-1>(o, x, p);
            } else {
                u32 y[NT][4][2];
                scaled(y, p, nv == 4 ? 0x54005400u : 0x44004400u);
                dot_v<-1>(o, x, y);
                read_v_rows(x, arrived(), r, c);
                scaled(y, p, nv == 4 ? 0x4c004c00u : 0x3c003c00u);
                dot_v<-1>(o, x, y);
                if (nv == 4) {
                    read_v_rows(x, arrived(), r, c);
                    scaled(y, p, 0x44004400u);
                    dot_v<1>(o, x, y);
                    read_v_rows(x, arrived(), r, c);
                    dot_v<0>(o, x, p);
                }
            }
        }
        asm volatile("cp.async.wait_all;");
        __syncwarp();
    }
    __syncthreads();

    const float back = v_unit == 0.f ? 0.f : 16777216.f / v_unit;
    #pragma unroll
    for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            const int col = 8 * n + 2 * c + e;
            const float sum = sum_rows(l[n][e]), offset = sum_rows(off[n][e]);
            if (r == 0) { S.m[warp][col] = m[n][e]; S.l[warp][col] = sum; }
            #pragma unroll
            for (int k = 0; k < VW; k++)
                #pragma unroll
                for (int j = 0; j < 4; j++)
                    #pragma unroll
                    for (int z = 0; z < 2; z++)
                        #pragma unroll
                        for (int x = 0; x < 2; x++) {
                            const int p = z + 2 * x, w = r * VW + k;
                            const float down = p == 0 ? 1.f : p == 1 ? 0.25f : p == 2 ? 0.0625f : 0.015625f;
                            if (w < NW) S.o[warp][col][p * (D / 4) + 4 * w + j] = o[n][k][2 * j + z][2 * x + e] * down * back + offset;
                        }
        }
}

__device__ __forceinline__ float exact_at(const void* rows, i64 i) {
#if KIND == 0
    return ((const float*)rows)[i];
#elif KIND == 1
    return bf16(((const u16*)rows)[i]);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(((const u16*)rows)[i]));
    return y;
#endif
}

// Eight consecutive numbers of an exact row, starting at a multiple of 8.
__device__ __forceinline__ void exact_8(const void* rows, i64 i, float (&y)[8]) {
#if KIND == 0
    const float4 a = ((const float4*)rows)[i / 4], b = ((const float4*)rows)[i / 4 + 1];
    y[0] = a.x; y[1] = a.y; y[2] = a.z; y[3] = a.w; y[4] = b.x; y[5] = b.y; y[6] = b.z; y[7] = b.w;
#else
    const uint4 a = ((const uint4*)rows)[i / 8];
    const u32 w[4] = {a.x, a.y, a.z, a.w};
    #pragma unroll
    for (int k = 0; k < 4; k++) {
#if KIND == 1
        y[2 * k] = bf16(w[k]);
        y[2 * k + 1] = as_float(w[k] & 0xffff0000u);
#else
        asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(y[2 * k]), "=f"(y[2 * k + 1]) : "r"(w[k]));
#endif
    }
#endif
}

// Exact rows of the windows and the open page: few, so plain float32. A warp takes a page; a lane two tokens' logits, then
// some channels of the output.
__device__ void attend_exact(const Params& P, Smem& S, float (*weights)[NCOL][64], float (*q)[D], int h, int b) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 row0 = ((i64)b * HKV + h) * NCOL;
    const int length = P.lengths[b], newest = length - 1, oldest = length - P.tokens;
    for (int i = threadIdx.x; i < NCOL * D; i += 32 * WARPS) q[i / D][i % D] = P.q_exact[row0 * D + i];
    __syncthreads();
    constexpr int PER = (D + 31) / 32;
    float o[NCOL][PER], m[NCOL], l[NCOL];
    #pragma unroll
    for (int col = 0; col < NCOL; col++) {
        m[col] = NEVER;
        l[col] = 0.f;
        #pragma unroll
        for (int k = 0; k < PER; k++) o[col][k] = 0.f;
    }
    const int n_pages = P.width;
    int seen = 0;
    for (int j0 = 0; j0 < n_pages; j0 += 32) {
        int page = -1, start = 0, slot = -1, rows = 0, open = 0;
        if (j0 + lane < n_pages) page = P.page_ids[(i64)b * P.width + j0 + lane];
        if (page >= 0) {
            const int* t = P.table + (i64)page * COLUMNS;
            start = t[0]; rows = t[1]; open = t[2] == 0; slot = t[10];
            if (slot >= 0 && !(open || start < P.sink || start >= oldest / 64 * 64 - P.recent)) slot = -1;
            if (start > newest) slot = -1;
        }
        for (u32 todo = __ballot_sync(~0u, slot >= 0); todo; todo &= todo - 1) {
            if (seen++ % WARPS != warp) continue;
            const int at = __ffs(todo) - 1;
            const int from = __shfl_sync(~0u, start, at), n = __shfl_sync(~0u, rows, at);
            const int unfinished = __shfl_sync(~0u, open, at);
            const i64 base = ((i64)__shfl_sync(~0u, slot, at) * 2 * HKV + h) * 64 * D;
            float x[2][NCOL];
            #pragma unroll
            for (int u = 0; u < 2; u++) {
                #pragma unroll
                for (int col = 0; col < NCOL; col++) x[u][col] = 0.f;
                if (lane + 32 * u < n)
                    for (int d = 0; d < D; d += 8) {
                        float k[8];
                        exact_8(P.exact, base + (i64)(lane + 32 * u) * D + d, k);
                        #pragma unroll
                        for (int col = 0; col < NCOL; col++)
                            #pragma unroll
                            for (int e = 0; e < 8; e++) x[u][col] += q[col][d + e] * k[e];
                    }
            }
            #pragma unroll
            for (int col = 0; col < NCOL; col++) {
                const int token = col / G, t = token < P.tokens ? oldest + token : -1;
                const bool reads = unfinished || from < P.sink || from >= t / 64 * 64 - P.recent;
                float top = NEVER;
                #pragma unroll
                for (int u = 0; u < 2; u++) {
                    const int row = lane + 32 * u;
                    x[u][col] = reads && row < n && from + row <= t ? capped(x[u][col], P.softcap) : NEVER;
                    top = fmaxf(top, x[u][col]);
                }
                for (int w = 16; w; w >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, w));
                const float now = fmaxf(m[col], top), keep = exp2_(m[col] - now);
                m[col] = now;
                l[col] *= keep;
                #pragma unroll
                for (int k = 0; k < PER; k++) o[col][k] *= keep;
                #pragma unroll
                for (int u = 0; u < 2; u++) {
                    const float y = x[u][col] == NEVER ? 0.f : exp2_(x[u][col] - now);
                    weights[warp][col][lane + 32 * u] = y;
                    l[col] += y;
                }
            }
            __syncwarp();
            for (int token = 0; token < n; token++) {
                float v[PER];
                #pragma unroll
                for (int k = 0; k < PER; k++)
                    v[k] = lane + 32 * k < D ? exact_at(P.exact, base + (i64)HKV * 64 * D + token * D + lane + 32 * k) : 0.f;
                #pragma unroll
                for (int col = 0; col < NCOL; col++)
                    #pragma unroll
                    for (int k = 0; k < PER; k++) o[col][k] += weights[warp][col][token] * v[k];
            }
            __syncwarp();
        }
    }
    #pragma unroll
    for (int col = 0; col < NCOL; col++) {
        float mass = l[col];
        for (int w = 16; w; w >>= 1) mass += __shfl_xor_sync(~0u, mass, w);
        if (lane == 0) { S.m[warp][col] = m[col]; S.l[warp][col] = mass; }
        #pragma unroll
        for (int k = 0; k < PER; k++) if (lane + 32 * k < D) S.o[warp][col][lane + 32 * k] = o[col][k];
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) lamina_decode(Params P) {
    extern __shared__ uint4 shared[];
    Smem& S = *(Smem*)shared;
    float (*weights)[NCOL][64] = (float (*)[NCOL][64])(&S + 1);
    float (*q)[D] = (float (*)[D])(weights + WARPS);
    const int split = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    if (split < P.splits) attend_packed(P, S, (u8*)shared, split, h, b);
    else attend_exact(P, S, weights, q, h, b);
    __syncthreads();
    float* out = P.partial + (((i64)split * gridDim.z + b) * HKV + h) * NCOL * (D + 2);
    for (int i = threadIdx.x; i < NCOL * D; i += 32 * WARPS) {
        const int col = i / D, d = i % D;
        float top = NEVER, sum = 0.f;
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, S.m[w][col]);
        for (int w = 0; w < WARPS; w++) sum += S.o[w][col][d] * exp2_(S.m[w][col] - top);
        out[col * (D + 2) + d] = sum;
        if (d == 0) {
            float mass = 0.f;
            for (int w = 0; w < WARPS; w++) mass += S.l[w][col] * exp2_(S.m[w][col] - top);
            out[col * (D + 2) + D] = top;
            out[col * (D + 2) + D + 1] = mass;
        }
    }
}

// q' = q q_forward, scaled, in the form that lamina_decode takes. One block a sequence, KV head and column.
extern "C" __global__ void lamina_query(
    const void* q, i64 stride_b, i64 stride_h, i64 stride_t, const float* q_forward, float scale, int tokens,
    u16* packed, float* meta, float* exact
) {
    const int col = blockIdx.x, h = blockIdx.y, b = blockIdx.z, d = threadIdx.x;
    __shared__ float x[D], most[32], sums[32], squares[32];
    const i64 row = ((i64)b * HKV + h) * NCOL + col;
    const int token = col / G, head = h * G + col % G;
    if (d < D) {
        x[d] = token < tokens ? exact_at(q, b * stride_b + head * stride_h + token * stride_t + d) * scale : 0.f;
        exact[row * D + d] = x[d];
    }
    __syncthreads();
    const float* matrix = q_forward + (i64)h * D * D + d;
    float y = 0.f;
    #pragma unroll 8
    for (int k = 0; k < D; k++) y += d < D ? x[k] * matrix[k * D] : 0.f;
    float top = fabsf(y), square = y * y;
    for (int w = 16; w; w >>= 1) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, w));
        square += __shfl_xor_sync(~0u, square, w);
    }
    if (d % 32 == 0) { most[d / 32] = top; squares[d / 32] = square; }
    __syncthreads();
    top = square = 0.f;
    for (int w = 0; w < (D + 31) / 32; w++) { top = fmaxf(top, most[w]); square += squares[w]; }
    // A power of two that brings the largest channel to between 2048 and 4096.
    const u32 exponent = min(max(__float_as_uint(top) & 0x7f800000u, 0x08000000u), 0x77000000u);
    const float up = as_float(0x7f000000u - exponent) * 2048.f, down = as_float(exponent) / 2048.f;
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(y * up));
    if (d < D) packed[row * D + d] = half;
    // Codes are unsigned: their offset is taken off with the sum of what they are multiplied by, rounding included.
    float sum;
    asm("cvt.f32.f16 %0, %1;" : "=f"(sum) : "h"(half));
    sum *= down;
    for (int w = 16; w; w >>= 1) sum += __shfl_xor_sync(~0u, sum, w);
    if (d % 32 == 0) sums[d / 32] = sum;
    __syncthreads();
    sum = 0.f;
    for (int w = 0; w < (D + 31) / 32; w++) sum += sums[w];
    if (d == 0) {
        meta[row * 4] = down;
        meta[row * 4 + 1] = sum;
        meta[row * 4 + 2] = square * 0.34657359027997264f;  // ln(2) / 2: |q'|^2 / 2 in natural units, times log2(e)
    }
}

// Merges the partial results, turns the packed part back into the engine's basis. One block a sequence and KV head.
extern "C" __global__ void lamina_merge(
    const float* partial, const float* v_backward, const float* mean_v, int splits, int tokens, int batch,
    void* out, float* lse_packed, float* lse
) {
    const int h = blockIdx.x, b = blockIdx.y, col = blockIdx.z, d = threadIdx.x;
    __shared__ float packed[D];
    const i64 stride = (i64)batch * HKV * NCOL * (D + 2), row = (((i64)b * HKV + h) * NCOL + col) * (D + 2);
    float top = NEVER, mass = 0.f, value = 0.f;
    for (int s = 0; s < splits; s++) top = fmaxf(top, partial[s * stride + row + D]);
    for (int s = 0; s < splits; s++) {
        const float w = exp2_(partial[s * stride + row + D] - top);
        mass += w * partial[s * stride + row + D + 1];
        value += w * partial[s * stride + row + d];
    }
    packed[d] = value;
    __syncthreads();
    float turned = mass * mean_v[h * D + d];
    const float* matrix = v_backward + (i64)h * D * D + d;
    #pragma unroll 8
    for (int k = 0; k < D; k++) turned += packed[k] * matrix[k * D];
    const float* exact = partial + splits * stride + row;
    const float all = fmaxf(top, exact[D]), wp = exp2_(top - all), we = exp2_(exact[D] - all);
    const float total = wp * mass + we * exact[D + 1];
    const float y = (wp * turned + we * exact[d]) / total;
    const int token = col / G, head = h * G + col % G;
    const i64 at = (((i64)b * tokens + token) * HKV * G + head) * D + d;
#if KIND == 0
    ((float*)out)[at] = y;
#elif KIND == 1
    u16 z;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(z) : "f"(y));
    ((u16*)out)[at] = z;
#else
    u16 z;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(z) : "f"(y));
    ((u16*)out)[at] = z;
#endif
    if (d == 0) {
        const i64 i = ((i64)b * HKV * G + head) * tokens + token;
        lse_packed[i] = mass > 0.f ? (top + log2f(mass)) * 0.6931471805599453f : -__int_as_float(0x7f800000);
        lse[i] = (all + log2f(total)) * 0.6931471805599453f;
    }
}
