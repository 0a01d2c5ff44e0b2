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

// Eight consecutive numbers of an exact row, starting at a multiple of 8.
DEVICE void exact_8(const void* rows, i64 i, float (&y)[8]) {
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
        y[2 * k] = from_f16((u16)w[k]);
        y[2 * k + 1] = from_f16((u16)(w[k] >> 16));
#endif
    }
#endif
}

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
