// How pages lie in memory: records and the page table as lamina/pages/layout.py and table.py say, and exact rows, whose
// dtype is KIND: 0 float32, 1 bfloat16, 2 float16. D is the head dimension, HKV the number of KV heads, RECORD_BYTES what a
// record takes, which an engine may pad.

#define COLUMNS 11
#define SLAB_BYTES (HKV * 16 * D)
#define SCALE_AT (2 * SLAB_BYTES)
#define MID_AT (SCALE_AT + 256 * HKV)
#define CENTER_AT (MID_AT + 256 * HKV)
#define GAIN_AT (CENTER_AT + (CENTERED ? HKV * D : 0))
#define CENTER_SCALE_AT (GAIN_AT + 8 * HKV)

// Whether a query at position t reads a page exactly that has exact rows.
DEVICE bool in_window(int start, int t, int sink, int recent) { return start < sink || start >= t / 64 * 64 - recent; }

DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE float scale16(u32 x) { return as_float(x << 15 & 0x7fff8000u); }
DEVICE float bf16(u32 x) { return as_float(x << 16); }
DEVICE int index_of(int bits) { return bits == 2 ? 0 : bits == 4 ? 1 : 2; }

DEVICE float exact_at(const void* rows, i64 i) {
#if KIND == 0
    return ((const float*)rows)[i];
#elif KIND == 1
    return bf16(((const u16*)rows)[i]);
#else
    return from_f16(((const u16*)rows)[i]);
#endif
}

// Two and eight consecutive numbers of exact rows as they are stored, from multiples of two and eight on.
#if KIND == 0
typedef float2 Pair;
struct Eight { float4 low, high; };
DEVICE void numbers(const Pair& x, float* y) { y[0] = x.x; y[1] = x.y; }
DEVICE void numbers(const Eight& x, float* y) {
    y[0] = x.low.x; y[1] = x.low.y; y[2] = x.low.z; y[3] = x.low.w;
    y[4] = x.high.x; y[5] = x.high.y; y[6] = x.high.z; y[7] = x.high.w;
}
#else
typedef u32 Pair;
typedef uint4 Eight;
DEVICE void numbers(Pair x, float* y) {
#if KIND == 1
    y[0] = bf16(x);
    y[1] = as_float(x & 0xffff0000u);
#else
    y[0] = from_f16((u16)x);
    y[1] = from_f16((u16)(x >> 16));
#endif
}
DEVICE void numbers(const Eight& x, float* y) {
    numbers(x.x, y);
    numbers(x.y, y + 2);
    numbers(x.z, y + 4);
    numbers(x.w, y + 6);
}
#endif
DEVICE Pair pair_at(const void* rows, i64 i) { return ((const Pair*)rows)[i / 2]; }
DEVICE Eight eight_at(const void* rows, i64 i) { return ((const Eight*)rows)[i / 8]; }

// A result of the engine's dtype.
DEVICE void write_exact(void* rows, i64 i, float y) {
#if KIND == 0
    ((float*)rows)[i] = y;
#elif KIND == 1
    ((u16*)rows)[i] = to_bf16(y);
#else
    ((u16*)rows)[i] = to_f16(y);
#endif
}
