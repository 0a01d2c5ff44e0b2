// Slabs of codes on their way through shared memory to the tensor cores; first part of the source of decode.cu.

#define NW (D / 16)
#define KW ((NW + 3) / 4)
#define VW ((NW + 7) / 8)
#define NCOL (4 * NT)
#define WARPS 4
#define SLOTS 4
#define BLOCKS (NT * VW > 2 ? 2 : NT * VW > 1 ? 3 : 4)
#define NEVER (-1e30f)
#define PART (D + 2 + 4 * MEASURED)

template <int N> struct Int { static constexpr int value = N; };

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
