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

#define NW (D / 16)
#define KW ((NW + 3) / 4)
#define VW ((NW + 7) / 8)
#define NCOL (4 * NT)
#define WARPS 4
#define SLOTS 4
#define BLOCKS (NT * VW > 2 ? 2 : NT * VW > 1 ? 3 : 4)
#define NEVER (-1e30f)
#define PART (D + 2 + 3 * MEASURED)
#define LN2 0.69314718056f

template <int N> struct Int { static constexpr int value = N; };

struct Params {
    const u8* q;             // int8 [B, HKV, 2 NCOL, D]: high and low bytes of q' * scaling * log2(e) in units, times
                             // 1/4 for channels of odd planes
    const float* q_meta;     // [B, HKV, NCOL, 4]: unit of the integers, sum of q', energy, squared norm in natural units
    const float* q_exact;    // [B, HKV, NCOL, D]: q * scaling * log2(e)
    const u8* records;       // [N, RECORD_BYTES]
    const u8* slabs;         // [M, HKV, 64, D/4]
    const void* exact;       // [E, 2, HKV, 64, D]
    const int* table;        // [N, COLUMNS]
    const int* page_ids;     // [B, width]
    const int* lengths;      // [B]
    const float* kappa;      // [HKV, 3, 3]
    float* partial;          // [splits + exact_splits, B, HKV, NCOL, PART], packed, then exact rows: values, maximum,
                             // mass, spread
    int width, splits, exact_splits, exact_cost, tokens, sink, recent;
    float softcap;           // in units of log2(e), 0 for none
    float variance[6];       // of rows, in units of their squared step: K at 2, 4, 8 bits, V
    float along;             // 1/D if errors avoid the row itself
};

DEVICE float max_rows(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}
DEVICE float sum_rows(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}
DEVICE float capped(float x, float cap) {
    float e = exp2_(x / cap * 2.8853900817779268f);
    return cap * (1.f - 2.f / (e + 1.f));
}
DEVICE int whole(const int (&c)[4], int s) { return 256 * c[2 * s] + c[2 * s + 1]; }
// A thread's x-th of eight 16-bit numbers, in place for scale16 and bf16.
DEVICE u32 word_of(const uint4& x, int e) { return e < 2 ? x.x : e < 4 ? x.y : e < 6 ? x.z : x.w; }
DEVICE float scale_of(const uint4& x, int e) {
    const u32 w = word_of(x, e);
    return as_float((e & 1 ? w >> 1 : w << 15) & 0x7fff8000u);
}
DEVICE float mid_of(const uint4& x, int e) {
    const u32 w = word_of(x, e);
    return as_float(e & 1 ? w & 0xffff0000u : w << 16);
}

// Slabs travel through shared memory, a ring of slots a warp, SLOTS - 1 of them in flight. Rows are stored there in an order
// in which a warp's reads meet no bank twice, where a row is 1, 2 or 4 pieces of 16 bytes: bits of its number change places.
#define ROW (D / 4)
#define SORTED (ROW == 16 || ROW == 32 || ROW == 64)
#define SLOT (16 * D + 512)
constexpr __device__ int k_place(int t) { return SORTED ? (t & 7) * 8 + (t >> 3) : t; }
constexpr __device__ int v_place(int t) { return SORTED ? (t & 15) * 4 + (t >> 4) : t; }
// Copies a slab of 64 rows; ``from`` and ``to`` are the lane's, the latter slab_place away from the slot.
template <bool V, int M = 0>
DEVICE void copy_slab(u32 to, const u8* from, int lane) {
    if constexpr (M < (D + 31) / 32) {
        constexpr int ROWS = 512 * M / ROW;
        if (D % 32 == 0 || lane + 32 * M < D) copy_16<SORTED ? (V ? v_place(ROWS) : k_place(ROWS)) * ROW : 512 * M, 512 * M>(to, from);
        copy_slab<V, M + 1>(to, from, lane);
    }
}
template <bool V>
DEVICE int slab_place(int lane) {
    const int row = lane * 16 / ROW, in = lane * 16 % ROW;
    return SORTED ? (V ? v_place(row) : k_place(row)) * ROW + in : lane * 16;
}

// Words that this thread's fragments of K take: rows 8r + 0..7, KW words each.
struct KRows { u32 w[8][KW]; };
DEVICE void read_k(KRows& x, const u8* slot, int r, int c) {
    #pragma unroll
    for (int e = 0; e < 8; e++) {
        const u32* row = (const u32*)(slot + (SORTED ? 8 * e + r : 8 * r + e) * ROW) + c * KW;  // k_place(8r + e)
        if (NW == 4 * KW && KW == 2) { uint2 y = *(const uint2*)row; x.w[e][0] = y.x; x.w[e][KW - 1] = y.y; }
        else {
            #pragma unroll
            for (int k = 0; k < KW; k++) x.w[e][k] = c * KW + k < NW ? row[k] : 0;
        }
    }
}
// What a slab holds: pairs of bits of all planes of channels, or nibbles of planes 0 and 2 or 1 and 3.
enum Slab { PAIRS = -1, NIBBLES_0, NIBBLES_1 };

// acc += codes of a slab times queries.
// ``zero`` is one that the compiler does not know of: for nibbles, queries go to other registers, in pairs as these
// products take them.
template <Slab SLAB>
DEVICE void dot_k(int (&acc)[NT][4][4], const KRows& x, const u32 (&bq)[NT][KW][4], u32 zero) {
    constexpr bool PAIR = SLAB == PAIRS;
    constexpr u32 LOW = PAIR ? 0x03030303u : 0x0f0f0f0fu, HIGH = PAIR ? 0x0c0c0c0cu : 0x0f0f0f0fu;
    #pragma unroll
    for (int k = 0; k < KW; k++)
        #pragma unroll
        for (int i = 0; i < 4; i++)
            #pragma unroll
            for (int z = 0; z < (PAIR ? 2 : 1); z++) {
                const u32 a = x.w[2 * i][k] >> (4 * z), b = x.w[2 * i + 1][k] >> (4 * z);
                const u32 up_a = PAIR ? a : a >> 4, up_b = PAIR ? b : b >> 4;
                #pragma unroll
                for (int n = 0; n < NT; n++) {
                    const u32 q0 = PAIR ? bq[n][k][2 * z] : bq[n][k][SLAB & 1] ^ zero;
                    const u32 q1 = PAIR ? bq[n][k][2 * z + 1] : bq[n][k][2 + (SLAB & 1)] ^ zero;
                    mma_u8s8(acc[n][i], a & LOW, b & LOW, up_a & HIGH, up_b & HIGH, q0, q1);
                }
            }
}
DEVICE void quadruple(int (&acc)[NT][4][4]) {
    #pragma unroll
    for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) acc[n][i][e] <<= 2;
}

// Byte j of word k of four tokens each, 16c + 2i + {0, 1, 8, 9}.
struct VRows { u32 w[VW][4][4]; };
DEVICE void read_v(VRows& x, const u8* slot, int r, int c) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int k = 0; k < VW; k++) {
            u32 w[4];
            #pragma unroll
            for (int t = 0; t < 4; t++) {
                const int token = 2 * i + (t & 1) + 8 * (t >> 1);
                const u32* row = (const u32*)(slot + (SORTED ? 4 * token + c : 16 * c + token) * ROW) + r * VW;  // v_place
                w[t] = r * VW + k < NW ? row[k] : 0;
            }
            const u32 s = __byte_perm(w[0], w[1], 0x5140), t = __byte_perm(w[0], w[1], 0x7362);
            const u32 u = __byte_perm(w[2], w[3], 0x5140), v = __byte_perm(w[2], w[3], 0x7362);
            x.w[k][0][i] = __byte_perm(s, u, 0x5410);
            x.w[k][1][i] = __byte_perm(s, u, 0x7632);
            x.w[k][2][i] = __byte_perm(t, v, 0x5410);
            x.w[k][3][i] = __byte_perm(t, v, 0x7632);
        }
}
typedef float Out[NT][VW][4][4];  // by tile, word, byte and plane: channel plane * D/4 + 4 (r VW + word) + byte
// o += factor * codes of a slab times weights.
template <Slab SLAB>
DEVICE void dot_v(Out& o, const VRows& x, const u32 (&w)[NT][4], const float (&factor)[NT]) {
    constexpr bool PAIR = SLAB == PAIRS;
    #pragma unroll
    for (int k = 0; k < VW; k++)
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int z = 0; z < (PAIR ? 2 : 1); z++) {
                const u32 low = PAIR ? 0x03030303u << (4 * z) : 0x0f0f0f0fu, high = PAIR ? 0x0c0c0c0cu << (4 * z) : 0xf0f0f0f0u;
                constexpr int S = SLAB & 1;
                const int p0 = PAIR ? 2 * z : S, p1 = PAIR ? 2 * z + 1 : S + 2;
                const u32 (&a)[4] = x.w[k][j];
                #pragma unroll
                for (int n = 0; n < NT; n++) {
                    int acc[4] = {0, 0, 0, 0};
                    mma_u8u8(acc, a[0] & low, a[0] & high, a[1] & low, a[1] & high, w[n][0], w[n][1]);
                    mma_u8u8(acc, a[2] & low, a[2] & high, a[3] & low, a[3] & high, w[n][2], w[n][3]);
                    o[n][k][j][p0] = fmaf(factor[n], (float)whole(acc, 0), o[n][k][j][p0]);
                    o[n][k][j][p1] = fmaf(factor[n], (float)whole(acc, 1), o[n][k][j][p1]);
                }
            }
}

// What the table says of one page.
struct Page {
    int id = -1, start = 0, rows = 0, tier_k = 0, tier_v = 0, slot = -1;
    int finer[6] = {-1, -1, -1, -1, -1, -1};  // slabs beyond the base in the order in which they are read: K's, V's
    bool exact = false, exact_for_all = false;  // read exactly by the oldest query token, by the newest

    DEVICE void look_up(const Params& P, int b, int j, int oldest, int newest) {
        id = P.page_ids[(i64)b * P.width + j];
        if (id < 0) return;
        const int* t = P.table + (i64)id * COLUMNS;
        start = t[0]; rows = t[1]; tier_k = t[2]; tier_v = t[3]; slot = t[10];
        finer[0] = t[4]; finer[1] = t[7]; finer[2] = t[6]; finer[3] = t[5]; finer[4] = t[9]; finer[5] = t[8];
        exact = tier_k == 0 || (slot >= 0 && (start < P.sink || start >= oldest / 64 * 64 - P.recent));
        exact_for_all = tier_k == 0 || (slot >= 0 && (start < P.sink || start >= newest / 64 * 64 - P.recent));
        if (start > newest) id = -1;
    }
};
// A page that a warp will read, in shared memory: {id, start, kind, -}, finer slabs, centers times queries by column.
// kind: rows | planes of K << 8 | of V << 12 | bits of K << 16 | of V << 20 | has exact rows << 24.
struct Entry {
    int4 page;
    int finer[8];
    float center[NCOL];
};
#define KIND_OF(NK, NV, K, V) (64 | (NK) << 8 | (NV) << 12 | (K) << 16 | (V) << 20)
// Pages of a sequence of ``length`` tokens: as many as that tells, or more where pages were cut.
DEVICE int pages_of(const int* ids, int width, int length) {
    int n = min(width, (length + 63) / 64);
    while (n < width && ids[n] >= 0) n++;
    return n;
}
DEVICE int pages_of(const Params& P, int b) { return pages_of(P.page_ids + (i64)b * P.width, P.width, P.lengths[b]); }

struct Smem {
    float m[WARPS][NCOL], l[WARPS][NCOL], spread[WARPS][NCOL][3];
    float o[WARPS][NCOL][D];
};

// A warp at work on the pages of one sequence and KV head; a thread has column 4n + c of every tile n.
struct Reader {
    const Params& P;
    u8* ring;
    Entry* entries;
    const int h, lane, r, c, oldest;
    u32 ring_at;
    int place_k, place_v, place_header;
    i64 head;
    u32 bq[NT][KW][4];
    float unit[NT], total[NT], energy[NT], m[NT], l[NT], off[NT];
    int position[NT];
    Out o;
#if MEASURED
    float norm[NT], spread[NT][3];
#endif

    DEVICE Reader(const Params& P, u8* ring, int h, int b, int lane)
        : P(P), ring(ring), entries((Entry*)(ring + SLOTS * SLOT)), h(h), lane(lane), r(lane >> 2), c(lane & 3),
          oldest(P.lengths[b] - P.tokens), ring_at(shared_address(ring)), place_k(slab_place<false>(lane)),
          place_v(slab_place<true>(lane)), head(h * 16 * D + lane * 16) {
        place_header = (lane < 16 ? SCALE_AT : MID_AT) + ((lane >> 3 & 1) * HKV + h) * 128 + (lane & 7) * 16 - lane * 16 - h * 16 * D;
    }
    DEVICE void take_queries(int b) {
        finished_before();
        const i64 row0 = ((i64)b * HKV + h) * NCOL;
        #pragma unroll
        for (int n = 0; n < NT; n++) {
            const u8* q = P.q + (2 * row0 + 8 * n + r) * D;
            #pragma unroll
            for (int k = 0; k < KW; k++)
                #pragma unroll
                for (int p = 0; p < 4; p++) bq[n][k][p] = c * KW + k < NW ? *(const u32*)(q + p * (D / 4) + 4 * (c * KW + k)) : 0;
            const float4 meta = *(const float4*)(P.q_meta + (row0 + 4 * n + c) * 4);
            unit[n] = meta.x; total[n] = meta.y; energy[n] = meta.z;
            m[n] = NEVER; l[n] = off[n] = 0.f;
#if MEASURED
            norm[n] = meta.w; spread[n][0] = spread[n][1] = spread[n][2] = 0.f;
#endif
            const int token = (4 * n + c) / G;
            position[n] = oldest + (token < P.tokens ? token : P.tokens - 1);
            #pragma unroll
            for (int k = 0; k < VW; k++)
                #pragma unroll
                for (int j = 0; j < 4; j++)
                    #pragma unroll
                    for (int p = 0; p < 4; p++) o[n][k][j][p] = 0.f;
        }
    }

    // Sends for slab z of a page's K or V into a slot.
    template <bool V>
    DEVICE void fetch(const Entry& e, int z, int slot) const {
        const u32 to = ring_at + slot * SLOT;
        const u8* from = head + (z == 0 ? P.records + (i64)e.page.x * RECORD_BYTES + (V ? SLAB_BYTES : 0)
                                        : P.slabs + (i64)e.finer[V ? 2 + z : z - 1] * SLAB_BYTES);
        if (V) copy_slab<true>(to + place_v, from, lane);
        else {
            copy_slab<false>(to + place_k, from, lane);
            if (z == 0) copy_16<16 * D>(to + lane * 16, from + place_header);
        }
    }
    static DEVICE void wait() {
        wait_for_groups<SLOTS - 2>();
        __syncwarp();
    }

    // Centers of 16 pages at a time times queries, odd planes first as queries carry 1/4: page r (+ 8) in the rows.
    DEVICE void centers(int count) {
        const u32 zero = (u32)P.width >> 31;
        for (int g = 0; g < count; g += 16) {
            int sum[NT][2] = {};
            const u8* from[2];
            #pragma unroll
            for (int s = 0; s < 2; s++) from[s] = P.records + (i64)entries[min(g + 8 * s + r, count - 1)].page.x * RECORD_BYTES;
            #pragma unroll
            for (int z = 1; z >= 0; z--) {
                int acc[NT][4] = {};
                #pragma unroll
                for (int p = z; p < 4; p += 2)
                    #pragma unroll
                    for (int k = 0; k < KW; k += 2) {
                        u32 a[2][2] = {};
                        #pragma unroll
                        for (int s = 0; s < 2; s++)
                            #pragma unroll
                            for (int x = 0; x < 2; x++)
                                if (k + x < KW && c * KW + k + x < NW)
                                    a[s][x] = *(const u32*)(from[s] + CENTER_AT + h * D + p * (D / 4) + 4 * (c * KW + k + x));
                        #pragma unroll
                        for (int n = 0; n < NT; n++)
                            mma_s8s8(acc[n], a[0][0], a[1][0], a[0][1], a[1][1], bq[n][k][p] ^ zero, k + 1 < KW ? bq[n][k + 1 < KW ? k + 1 : k][p] ^ zero : 0);
                    }
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    #pragma unroll
                    for (int s = 0; s < 2; s++) sum[n][s] = 4 * sum[n][s] + whole(acc[n], s);
            }
            #pragma unroll
            for (int s = 0; s < 2; s++) {
                const float scale = scale16(*(const u16*)(from[s] + CENTER_SCALE_AT + 2 * h));
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    if (g + 8 * s + r < count) entries[g + 8 * s + r].center[4 * n + c] = scale * unit[n] * (float)sum[n][s];
            }
        }
    }

    // The page's numbers, from the slot of its first slab; and the largest step of V: steps are ordered as their bits are.
    struct Header { uint4 k_scales, v_scales, k_mids, v_mids; };
    DEVICE Header header_of(const u8* here) const {
        const uint4* x = (const uint4*)(here + 16 * D + 16 * r);
        return Header{x[0], x[8], x[16], x[24]};
    }
    static DEVICE float most_of(const uint4& v_scales) {
        const u32 pairs = __vmaxu2(__vmaxu2(v_scales.x, v_scales.y), __vmaxu2(v_scales.z, v_scales.w));
        return fmaxf(max_rows(scale16(max(pairs & 0xffffu, pairs >> 16))), 1e-30f);
    }

    // What is known of a page's codes beyond their bits.
    struct Reading { float gain_k, gain_v, half_k, half_v, noise, variance_k, variance_v; };

    // Products of a page -> weights for its V, their factors, and the running softmax.
    template <bool ALL>
    DEVICE void softmax(
        const int (&acc)[NT][4][4], const Header& x, const Reading& y, const Entry& e, float most, u32 (&w)[NT][4], float (&factor)[NT]
    ) {
        const float up = __fdividef(65280.f, most);
        float keep[NT];
        bool higher = false;
        #pragma unroll
        for (int n = 0; n < NT; n++) {
            // Everything that a step multiplies carries the gain.
            const float one = unit[n] * y.gain_k, middle = y.half_k * total[n] * y.gain_k, loss = y.noise * energy[n] * y.gain_k * y.gain_k;
            const float of_center = CENTERED ? e.center[4 * n + c] : 0.f;
            float s[8];
#if MEASURED
            float errs[8];
#endif
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                const float step = scale_of(x.k_scales, i), dot = fmaf(one, (float)whole(acc[n][i >> 1], i & 1), -middle);
#if MEASURED
                const float along = LN2 * fmaf(step, dot, mid_of(x.k_mids, i) * total[n]);
                errs[i] = fmaxf(y.variance_k * step * step * norm[n] - along * along * P.along, 0.f);
#endif
                s[i] = fmaf(step, fmaf(-loss, step, dot), fmaf(mid_of(x.k_mids, i), total[n], of_center));
#if CAPPED
                s[i] = capped(s[i], P.softcap);
#if MEASURED
                const float slope = 1.f - s[i] * s[i] / (P.softcap * P.softcap);
                errs[i] *= slope * slope;
#endif
#endif
            }
            if (!ALL) {
                const int from = e.page.y, kind = e.page.z, t = position[n];
                const bool exact = kind >> 24 && (from < P.sink || from >= t / 64 * 64 - P.recent);
                #pragma unroll
                for (int i = 0; i < 8; i++)
                    if (8 * r + i >= (kind & 255) || from + 8 * r + i > t || exact) s[i] = NEVER;
            }
            float top = NEVER;
            #pragma unroll
            for (int i = 0; i < 8; i++) top = fmaxf(top, s[i]);
            top = max_rows(top);
            const float now = fmaxf(m[n], top);
            higher = higher || now > m[n];
            keep[n] = exp2_(m[n] - now);
            m[n] = now;
            // Weights are relative to the page's maximum; a page of which nothing is seen counts for nothing.
            const float share = !ALL && top == NEVER ? 0.f : exp2_(top - now);
            if (!ALL) top = fmaxf(top, 0.1f * NEVER);
            float mass = 0.f, offset = 0.f, stepped = 0.f;
#if MEASURED
            float sums[3] = {0.f, 0.f, 0.f};
#endif
            u32 q[8];
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                const float p = exp2_(s[i] - top), z = p * scale_of(x.v_scales, i);
                mass += p;
                offset = fmaf(p, mid_of(x.v_mids, i), offset);
                stepped += z;
                // The integer is in the low bits of the sum.
                q[i] = __float_as_uint(fmaf(z, up, 8388608.f));
#if MEASURED
                sums[0] = fmaf(p, errs[i], sums[0]);
                sums[1] = fmaf(p * p, errs[i], sums[1]);
                sums[2] = fmaf(z * z, y.variance_v, sums[2]);
#endif
            }
            #pragma unroll
            for (int i = 0; i < 4; i++) w[n][i] = transposed(__byte_perm(q[2 * i], q[2 * i + 1], 0x4051));
            l[n] = fmaf(l[n], keep[n], share * mass);
            off[n] = fmaf(off[n], keep[n], share * fmaf(-y.half_v * y.gain_v, stepped, offset));
            factor[n] = share * most * y.gain_v * (1.f / 65280.f);
#if MEASURED
            #pragma unroll
            for (int z = 0; z < 3; z++)
                spread[n][z] = fmaf(spread[n][z], z ? keep[n] * keep[n] : keep[n], sums[z] * (z ? share * share : share));
#endif
        }
        if (__any_sync(~0u, higher)) {
            #pragma unroll
            for (int n = 0; n < NT; n++)
                #pragma unroll
                for (int k = 0; k < VW; k++)
                    #pragma unroll
                    for (int j = 0; j < 4; j++)
                        #pragma unroll
                        for (int p = 0; p < 4; p++) o[n][k][j][p] *= keep[n];
        }
    }
    DEVICE void scaled(float (&to)[NT], const float (&factor)[NT], float by) const {
        #pragma unroll
        for (int n = 0; n < NT; n++) to[n] = factor[n] * by;
    }

    // Sends for the J-th slab from page ``at`` on, of pages that have NK and NV; ``base`` slabs were sent for before.
    template <int NK, int NV, int J>
    DEVICE void send(int at, int high, int base) const {
        constexpr int ALL = NK + NV, Z = J % ALL;
        const int page = at + J / ALL;
        if (page < high) fetch<(Z >= NK)>(entries[page], Z < NK ? Z : Z - NK, ALL % 4 ? (base + J) % SLOTS : J % SLOTS);
        end_group();
    }
    template <int NK, int NV>
    DEVICE void begin(int low, int high) const {
        send<NK, NV, 0>(low, high, 0);
        send<NK, NV, 1>(low, high, 0);
        send<NK, NV, 2>(low, high, 0);
    }

    // Pages [low, high) that have NK and NV planes, are read as they were encoded, whole and by all query tokens.
    template <int NK, int NV>
    DEVICE void run(int low, int high, bool begun) {
        constexpr int ALL = NK + NV, K = NK == 1 ? 2 : 2 * NK, V = NV == 1 ? 2 : 2 * NV, IK = K == 2 ? 0 : K == 4 ? 1 : 2, IV = V == 2 ? 0 : V == 4 ? 1 : 2;
        const Reading reading{1.f, 1.f, 0.5f * ((1 << K) - 1), 0.5f * ((1 << V) - 1), P.kappa[h * 9 + 4 * IK], P.variance[IK], P.variance[3 + IV]};
        int base = 0, at = low;
        auto arrived = [&](auto J) -> const u8* {
            constexpr int j = decltype(J)::value;
            wait();
            send<NK, NV, j + SLOTS - 1>(at, high, base);
            return ring + (ALL % 4 ? (base + j) % SLOTS : j % SLOTS) * SLOT;
        };
        if (!begun) begin<NK, NV>(low, high);
        #pragma unroll 1
        for (; at < high; at++) {
            const u8* here = arrived(Int<0>());
            const Header x = header_of(here);
            const float most = most_of(x.v_scales);
            int acc[NT][4][4] = {};
            {
                KRows k;
                read_k(k, here, r, c);
                dot_k<PAIRS>(acc, k, bq, 0);
                if constexpr (NK >= 2) {
                    read_k(k, arrived(Int<1>()), r, c);
                    quadruple(acc);
                    dot_k<PAIRS>(acc, k, bq, 0);
                }
                if constexpr (NK == 4) {
                    const u32 zero = (u32)P.width >> 31;
                    read_k(k, arrived(Int<2>()), r, c);
                    quadruple(acc);
                    dot_k<NIBBLES_1>(acc, k, bq, zero);
                    read_k(k, arrived(Int<3>()), r, c);
                    quadruple(acc);
                    dot_k<NIBBLES_0>(acc, k, bq, zero);
                }
            }
            u32 w[NT][4];
            float factor[NT], by[NT];
            softmax<true>(acc, x, reading, entries[at], most, w, factor);
            VRows v;
            read_v(v, arrived(Int<NK>()), r, c);
            scaled(by, factor, NV == 4 ? 64.f : NV == 2 ? 4.f : 1.f);
            dot_v<PAIRS>(o, v, w, by);
            if constexpr (NV >= 2) {
                read_v(v, arrived(Int<NK + 1>()), r, c);
                scaled(by, factor, NV == 4 ? 16.f : 1.f);
                dot_v<PAIRS>(o, v, w, by);
            }
            if constexpr (NV == 4) {
                // Nibbles of planes 1 and 3 come out four times too small beside pairs, whose bits are at 2p.
                read_v(v, arrived(Int<NK + 2>()), r, c);
                scaled(by, factor, 4.f);
                dot_v<NIBBLES_1>(o, v, w, by);
                read_v(v, arrived(Int<NK + 3>()), r, c);
                dot_v<NIBBLES_0>(o, v, w, factor);
            }
            base += ALL;
        }
        wait_for_copies();
        __syncwarp();
    }

    // Any other pages: one after the other, nothing sent for ahead of a page.
    DEVICE void run_any(int low, int high) {
        #pragma unroll 1
        for (int at = low; at < high; at++) {
            const Entry& e = entries[at];
            const int kind = e.page.z, nk = kind >> 8 & 15, nv = kind >> 12 & 15, bits_k = kind >> 16 & 15, bits_v = kind >> 20 & 15;
            const int read_k_ = nk == 1 ? 2 : 2 * nk, read_v_ = nv == 1 ? 2 : 2 * nv;
            const u8* gains = P.records + (i64)e.page.x * RECORD_BYTES + GAIN_AT + 4 * h;
            Reading reading{1.f, 1.f, 0.5f * ((1 << read_k_) - 1), 0.5f * ((1 << read_v_) - 1), P.kappa[h * 9 + 3 * index_of(bits_k) + index_of(read_k_)],
                            P.variance[index_of(bits_k)], P.variance[3 + index_of(bits_v)]};
            if (read_k_ != bits_k) reading.gain_k = scale16(*(const u16*)(gains + 2 * index_of(read_k_))) * (float)(1 << (bits_k - read_k_));
            if (read_v_ != bits_v) reading.gain_v = scale16(*(const u16*)(gains + 4 * HKV + 2 * index_of(read_v_))) * (float)(1 << (bits_v - read_v_));
            Header x;
            int acc[NT][4][4] = {};
            #pragma unroll 1
            for (int z = 0; z < nk; z++) fetch<false>(e, z, z);
            wait_for_copies();
            __syncwarp();
            x = header_of(ring);
            const float most = most_of(x.v_scales);
            #pragma unroll 1
            for (int z = 0; z < nk; z++) {
                KRows k;
                read_k(k, ring + z * SLOT, r, c);
                quadruple(acc);
                if (z < 2) dot_k<PAIRS>(acc, k, bq, 0);
                else if (z == 2) dot_k<NIBBLES_1>(acc, k, bq, 0);
                else dot_k<NIBBLES_0>(acc, k, bq, 0);
            }
            __syncwarp();
            #pragma unroll 1
            for (int z = 0; z < nv; z++) fetch<true>(e, z, z);
            u32 w[NT][4];
            float factor[NT], by[NT];
            softmax<false>(acc, x, reading, e, most, w, factor);
            wait_for_copies();
            __syncwarp();
            #pragma unroll 1
            for (int z = 0; z < nv; z++) {
                VRows v;
                read_v(v, ring + z * SLOT, r, c);
                scaled(by, factor, z == 0 ? (nv == 4 ? 64.f : nv == 2 ? 4.f : 1.f) : z == 1 ? (nv == 4 ? 16.f : 1.f) : z == 2 ? 4.f : 1.f);
                if (z < 2) dot_v<PAIRS>(o, v, w, by);
                else if (z == 2) dot_v<NIBBLES_1>(o, v, w, by);
                else dot_v<NIBBLES_0>(o, v, w, by);
            }
            __syncwarp();
        }
    }
};

__device__ void attend_packed(const Params& P, Smem& S, u8* rings, int split, int h, int b) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Reader R(P, rings + warp * (SLOTS * SLOT + 32 * sizeof(Entry)), h, b, lane);
    const int newest = P.lengths[b] - 1, n_pages = pages_of(P, b);
    // Splits that read exact pages too get fewer packed ones.
    const auto start_of = [&](int split) {
        const i64 all = n_pages + P.exact_cost * P.exact_splits;
        return max(0, (int)(all * split / P.splits) - P.exact_cost * min(split, P.exact_splits));
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

// Exact rows of the windows and the open page, in plain float32. The first splits take such pages in turn, a warp 16 rows
// of a page, two lanes a row; then each lane some channels of the output.
__device__ void attend_exact(const Params& P, Smem& S, float (*weights)[NCOL][16], float (*q)[D], int split, int h, int b) {
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
    int seen = 0;
    // Pages [low, high), at most 32; whether the lowest and the highest of them are read exactly.
    auto visit = [&](int low, int high, bool& lowest, bool& highest) {
        Page mine;
        if (low + lane < high) mine.look_up(P, b, low + lane, oldest, newest);
        const u32 found = __ballot_sync(~0u, mine.id >= 0 && (mine.exact || mine.exact_for_all));
        lowest = found & 1;
        highest = high > low && found >> (high - low - 1) & 1;
        for (u32 todo = found; todo; todo &= todo - 1) {
            if (seen++ % P.exact_splits != split) continue;
            const int at = __ffs(todo) - 1;
            const int from = __shfl_sync(~0u, mine.start, at), n = min(__shfl_sync(~0u, mine.rows, at), length - from);
            const bool open = __shfl_sync(~0u, mine.tier_k, at) == 0;
            const i64 base = ((i64)__shfl_sync(~0u, mine.slot, at) * 2 * HKV + h) * 64 * D;
            const int row = 16 * warp + (lane >> 1);
            float x[NCOL];
            #pragma unroll
            for (int col = 0; col < NCOL; col++) x[col] = 0.f;
            if (row < n) {
                #pragma unroll 4
                for (int d = (lane & 1) * 8; d < D; d += 16) {
                    float k[8];
                    exact_8(P.exact, base + (i64)row * D + d, k);
                    #pragma unroll
                    for (int col = 0; col < NCOL; col++)
                        #pragma unroll
                        for (int e = 0; e < 8; e++) x[col] = fmaf(q[col][d + e], k[e], x[col]);
                }
            }
            #pragma unroll
            for (int col = 0; col < NCOL; col++) {
                const int token = col / G, t = token < P.tokens ? oldest + token : -1;
                const bool reads = open || from < P.sink || from >= t / 64 * 64 - P.recent;
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
                for (int k = 0; k < PER; k++) o[col][k] *= keep;
                y = y == NEVER ? 0.f : exp2_(y - now);
                if (lane & 1) weights[warp][col][lane >> 1] = y; else l[col] += y;
            }
            __syncwarp();
            #pragma unroll 4
            for (int i = 0; i < 16; i++) {
                if (16 * warp + i >= n) break;
                float v[PER];
                #pragma unroll
                for (int k = 0; k < PER; k++)
                    v[k] = lane + 32 * k < D ? exact_at(P.exact, base + (i64)(HKV * 64 + 16 * warp + i) * D + lane + 32 * k) : 0.f;
                #pragma unroll
                for (int col = 0; col < NCOL; col++)
                    #pragma unroll
                    for (int k = 0; k < PER; k++) o[col][k] = fmaf(weights[warp][col][i], v[k], o[col][k]);
            }
            __syncwarp();
        }
    };
    // The windows are at both ends: from the first page on as far as pages are exact, then from the last one back.
    const int n_pages = pages_of(P, b);
    int low = 0, high = n_pages;
    bool more = true, other;
    while (more && low < n_pages) {
        const int end = min(n_pages, low + 32);
        visit(low, end, other, more);
        low = end;
    }
    more = true;
    while (more && high > low) {
        const int start = max(low, high - 32);
        visit(start, high, more, other);
        high = start;
    }
    #pragma unroll
    for (int col = 0; col < NCOL; col++) {
        float mass = l[col];
        #pragma unroll
        for (int z = 1; z < 32; z *= 2) mass += __shfl_xor_sync(~0u, mass, z);
        if (lane == 0) { S.m[warp][col] = m[col]; S.l[warp][col] = mass; }
        #pragma unroll
        for (int k = 0; k < PER; k++) if (lane + 32 * k < D) S.o[warp][col][lane + 32 * k] = o[col][k];
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
    const int split = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    attend_packed(P, S, (u8*)shared, split, h, b);
    if (split >= P.exact_splits) next_may_start();
    write(P, S, true, split, h, b);
    if (split >= P.exact_splits) return;
    attend_exact(P, S, weights, q, split, h, b);
    next_may_start();
    write(P, S, false, split, h, b);
}

#define SLICES (D > 128 ? 2 : 4)
#define WIDE ((D + 31) / 32 * 32)

// Rows of the new tokens that go into the pages they belong to, which are open and have room.
struct NewRows {
    const void *k, *v;             // [B, HKV, tokens, D], or null
    i64 k_b, k_h, k_t, v_b, v_h, v_t;
    void* exact;
    const int *table, *page_ids, *lengths;  // the new tokens included
    int* damaged;                  // becomes ``mark`` where a row holds NaN or Inf
    int width, mark;
};

DEVICE void append(const NewRows& R, int tokens, int h, int b) {
    const int* ids = R.page_ids + (i64)b * R.width;
    const int length = R.lengths[b], last = pages_of(ids, R.width, length) - 1;
    bool bad = false;
    for (int t = 0; t < tokens; t++) {
        const int position = length - tokens + t;
        int j = last;
        while (j > 0 && R.table[(i64)ids[j] * COLUMNS] > position) j--;
        const int* page = R.table + (i64)ids[j] * COLUMNS;
        const i64 to = (((i64)page[10] * 2 * HKV + h) * 64 + position - page[0]) * D;
        for (int i = threadIdx.x; i < 2 * D; i += blockDim.x) {
            const bool v = i >= D;
            const int d = v ? i - D : i;
            const float x = v ? exact_at(R.v, b * R.v_b + h * R.v_h + t * R.v_t + d) : exact_at(R.k, b * R.k_b + h * R.k_h + t * R.k_t + d);
            write_exact(R.exact, to + (v ? (i64)HKV * 64 * D : 0) + d, x);
            bad = bad || (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
        }
    }
    if (bad) atomicMax(R.damaged, R.mark);
}

// q' = q q_forward, scaled, in the form that lamina_decode takes. One block a sequence and KV head; SLICES * WIDE threads.
extern "C" __global__ void __launch_bounds__(SLICES * WIDE) lamina_query(
    const void* q, i64 stride_b, i64 stride_h, i64 stride_t, const float* q_forward, float scale, int tokens,
    char* packed, float* meta, float* exact, const __grid_constant__ NewRows new_rows
) {
    const int h = blockIdx.x, b = blockIdx.y, d = threadIdx.x % WIDE, slice = threadIdx.x / WIDE;
    __shared__ float x[NCOL][D], sums[SLICES][NCOL][D];
    next_may_start();
    if (new_rows.k) append(new_rows, tokens, h, b);
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
    constexpr int EACH = D / SLICES;
    const float* matrix = q_forward + ((i64)h * D + slice * EACH) * D + d;
    float row[EACH < 32 ? EACH : 32];
    constexpr int STEP = EACH < 32 ? EACH : EACH % 32 == 0 ? 32 : EACH % 16 == 0 ? 16 : 4;
    for (int k0 = 0; k0 < EACH; k0 += STEP) {
        #pragma unroll
        for (int k = 0; k < STEP; k++) row[k] = d < D ? matrix[(k0 + k) * D] : 0.f;
        if (k0 == 0) __syncthreads();
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
extern "C" __global__ void __launch_bounds__(SLICES * WIDE) lamina_merge(
    const float* partial, const float* v_forward, const float* mean_v, int splits, int exact_splits, int tokens,
    int batch,
    void* out, float* lse_packed, float* lse, float* spread
) {
    const int h = blockIdx.x, b = blockIdx.y, col = blockIdx.z, d = threadIdx.x % WIDE, slice = threadIdx.x / WIDE;
    DYNAMIC_SHARED(float, weights);  // [splits + exact_splits]
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
            matrix[i][k] = row < D && at < D ? v_forward[((i64)h * D + row) * D + at] : 0.f;
        }
    finished_before();
    // A warp for the packed part, one for the exact part: what each split counts for.
    if (threadIdx.x < 64) {
        const int kind = threadIdx.x / 32, first = kind ? splits : 0, last = kind ? splits + exact_splits : splits;
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
        float a = 0.f, e = 0.f;
        #pragma unroll 8
        for (int s = slice; s < splits; s += SLICES) a = fmaf(weights[s], from[s * stride + d], a);
        #pragma unroll 8
        for (int s = splits + slice; s < splits + exact_splits; s += SLICES) e = fmaf(weights[s], from[s * stride + d], e);
        found[0][slice][d] = a;
        found[1][slice][d] = e;
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
    const float y = (wp * turned + we * exact[d]) / total;
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
