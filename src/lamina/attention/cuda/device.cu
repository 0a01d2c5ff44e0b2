// What kernels need beyond C++: PTX, and names that another compiler gives meanings of its own.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define DYNAMIC_SHARED(TYPE, NAME) extern __shared__ TYPE NAME[]

// A kernel may start while the one before it still runs; what that one wrote is there after ``finished_before``.
#if __CUDA_ARCH__ >= 900
DEVICE void finished_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void next_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void finished_before() {}
DEVICE void next_may_start() {}
#endif

// What is computed from this number is computed anew from here on, instead of being kept in registers.
DEVICE void forget(float& x) { asm volatile("" : "+f"(x)); }
DEVICE float exp2_(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float from_f16(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
DEVICE u16 to_f16(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
DEVICE u16 to_bf16(float x) { u16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
// Two numbers, the first in the low half.
DEVICE u32 to_f16_pair(float x, float y) { u32 z; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x)); return z; }
DEVICE u32 to_bf16_pair(float x, float y) { u32 z; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x)); return z; }
// Lets so many cycles pass.
DEVICE void rest(int cycles) { for (const i64 end = clock64() + cycles; clock64() < end;) {} }
// Waits for so many threads, in whole warps, to come to one of the barriers 1 to 15.
DEVICE void sync_some(int barrier, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory"); }
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
// Four 8 x 8 matrices of 16-bit numbers in shared memory, the rows of which lie where the lanes say, as an operand a.
DEVICE void load_matrices(u32 (&a)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(row) : "memory");
}

// c += a b, [16, 8] += [16, 32] [32, 8] of bytes and [16, 16] [16, 8] of 16-bit numbers.
#define MMA(NAME, SHAPE, NUMBER, KIND_C, A, B) \
    DEVICE void NAME(NUMBER (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
        asm("mma.sync.aligned." SHAPE ".row.col." KIND_C "." A "." B "." KIND_C " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
            : MMA_OUT_##NUMBER(c) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); \
    }
#define MMA_OUT_int(c) "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
#define MMA_OUT_float(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
MMA(mma_u8s8, "m16n8k32", int, "s32", "u8", "s8")
MMA(mma_u8u8, "m16n8k32", int, "s32", "u8", "u8")
MMA(mma_s8s8, "m16n8k32", int, "s32", "s8", "s8")
MMA(mma_f16, "m16n8k16", float, "f32", "f16", "f16")
MMA(mma_bf16, "m16n8k16", float, "f32", "bf16", "bf16")

// Copies of 16 bytes into shared memory that run by themselves, in groups that arrive in order.
DEVICE u32 shared_address(const void* x) { return (u32)__cvta_generic_to_shared(x); }
template <int TO = 0, int FROM = 0>
DEVICE void copy_16(u32 to, const void* from) {
    // By way of the first-level cache: past it, on an H200, these copies take a third longer.
    asm volatile("cp.async.ca.shared.global [%0 + %2], [%1 + %3], 16;" :: "r"(to), "l"(from), "n"(TO), "n"(FROM));
}
DEVICE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void wait_for_groups() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
