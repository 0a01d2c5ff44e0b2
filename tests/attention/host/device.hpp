// Stands in for device.cu on the CPU: kernels run as they are, one block after the other, each thread of a block a fiber.
//
// A thread runs until it waits for others: at a product, a shuffle, __syncwarp or __syncthreads. Which of the threads that
// can go on does so first changes from turn to turn, so that threads which count on an order do not get it every time.
// Memory of a block holds 0xff until it is written, and so does what an asynchronous copy writes until it is waited for.

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <type_traits>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace {

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define __global__
#define __device__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("block_memory"), aligned(16)))
#define DEVICE inline
#define DYNAMIC_SHARED(TYPE, NAME) TYPE* NAME = (TYPE*)host::dynamic

struct dim3 { u32 x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

dim3 threadIdx, blockIdx, blockDim, gridDim;

// ------------------------------------------------------------------------------------------------- threads of a block
namespace host {

constexpr int STACK = 1 << 18, MOST_THREADS = 1024, MOST_DYNAMIC = 227 * 1024, BEYOND = 4096;

// Where a fiber, or the loop that runs them, goes on.
#if defined(__x86_64__)
typedef void* Place;
asm(R"(
    .text
    .type switch_fiber, @function
switch_fiber:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");
extern "C" void switch_fiber(Place*, Place) __asm__("switch_fiber");
void go(Place& from, Place& to) { switch_fiber(&from, to); }
void prepare(Place& place, char* stack, void (*start)()) {
    void** top = (void**)(stack + STACK) - 2;  // a function starts with its stack 8 bytes off a multiple of 16
    *top = (void*)start;
    top[1] = nullptr;
    place = top - 6;
}
#else
typedef ucontext_t Place;
void go(Place& from, Place& to) { swapcontext(&from, &to); }
void prepare(Place& place, char* stack, void (*start)()) {
    getcontext(&place);
    place.uc_stack.ss_sp = stack;
    place.uc_stack.ss_size = STACK;
    makecontext(&place, start, 0);
}
#endif

struct Copy { void* to; const void* from; };
struct Thread {
    Place place;
    int lane, warp;
    const char* waits_at;  // name of the operation that it waits to happen
    u32 mask;              // lanes that take part
    void* operands;
    std::vector<std::vector<Copy>> groups;  // of copies, the last of them open
};
struct Warp { u32 can_go, waits, returned; };

Thread threads[MOST_THREADS], *self;
Warp warps[MOST_THREADS / 32];
Place loop;
int count, at_barrier;
char* stacks;
char error[1000];
u32 random_bits;
void (*run_kernel)();

alignas(16) __attribute__((section("block_memory"))) u8 dynamic[MOST_DYNAMIC + BEYOND] = {0};
extern "C" u8 __start_block_memory[], __stop_block_memory[];

// Ends the launch; the calling thread does not go on.
[[noreturn]] void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    const int n = snprintf(error, sizeof error, "thread %u of block (%u, %u, %u): ", threadIdx.x, blockIdx.x, blockIdx.y, blockIdx.z);
    vsnprintf(error + n, sizeof error - n, format, values);
    va_end(values);
    Place nowhere;
    for (;;) go(nowhere, loop);
}
bool coin() { return (random_bits = random_bits * 1664525u + 1013904223u) >> 31; }
__attribute__((noinline)) void pause() {
    warps[self->warp].can_go &= ~(1u << self->lane);
    go(self->place, loop);
}
void start() {
    run_kernel();
    warps[self->warp].returned |= 1u << self->lane;
    self->waits_at = nullptr;
    pause();
}
void resume(int i) {
    self = &threads[i];
    threadIdx.x = i;
    go(loop, self->place);
}

// The lanes of ``mask`` come together: the last to arrive does it for all of them, given every lane's operands.
template <class Operands, class Together>
__attribute__((noinline)) void together(const char* name, u32 mask, Operands& mine, Together do_it) {
    Warp& warp = warps[self->warp];
    Thread* lanes = &threads[32 * self->warp];
    if (!(mask >> self->lane & 1)) fail("%s with a mask of %08x, which leaves out the calling lane", name, mask);
    if (mask & warp.returned) fail("%s with a mask of %08x, of which %08x have returned", name, mask, mask & warp.returned);
    self->waits_at = name;
    self->mask = mask;
    self->operands = &mine;
    warp.waits |= 1u << self->lane;
    bool all = (warp.waits & mask) == mask;
    for (u32 todo = mask; all && todo; todo &= todo - 1) {
        const Thread& other = lanes[__builtin_ctz(todo)];
        all = other.mask == mask && !strcmp(other.waits_at, name);
    }
    if (!all) return pause();
    Operands* operands[32] = {};
    for (u32 todo = mask; todo; todo &= todo - 1) operands[__builtin_ctz(todo)] = (Operands*)lanes[__builtin_ctz(todo)].operands;
    do_it(operands);
    warp.waits &= ~mask;
    warp.can_go |= mask;
}

// Of threads that wait for the same, the first is named.
void describe_what_waits() {
    int n = snprintf(error, sizeof error, "no thread of block (%u, %u, %u) can go on:", blockIdx.x, blockIdx.y, blockIdx.z);
    for (int i = 0, next; i < count; i = next) {
        const Thread& x = threads[i];
        for (next = i + 1; next < count && threads[next].waits_at == x.waits_at && threads[next].mask == x.mask;) next++;
        const size_t left = sizeof error - n;
        if (x.waits_at) n += snprintf(error + n, left, " %d to %d wait at %s, mask %08x;", i, next - 1, x.waits_at, x.mask);
        else n += snprintf(error + n, left, " %d to %d have returned;", i, next - 1);
        if (n >= (int)sizeof error) return;
    }
}

void run_block(int shared) {
    memset(__start_block_memory, 0xff, __stop_block_memory - __start_block_memory);
    at_barrier = 0;
    for (int i = 0; i < count; i++) {
        Thread& x = threads[i];
        x.lane = i % 32;
        x.warp = i / 32;
        x.waits_at = nullptr;
        x.mask = 0;
        x.groups.assign(1, {});
        prepare(x.place, stacks + (size_t)i * STACK, start);
        if (x.lane == 0) warps[x.warp] = {0, 0, ~0u};
        warps[x.warp].can_go |= 1u << x.lane;
        warps[x.warp].returned &= ~(1u << x.lane);
    }
    const int n_warps = (count + 31) / 32;
    for (bool any = true; any;) {
        any = false;
        const bool last_first = coin();
        for (int i = 0; i < n_warps; i++) {
            Warp& warp = warps[last_first ? n_warps - 1 - i : i];
            while (warp.can_go) {
                any = true;
                const bool high_first = coin();
                for (u32 todo = warp.can_go; todo;) {
                    const int lane = high_first ? 31 - __builtin_clz(todo) : __builtin_ctz(todo);
                    todo &= ~(1u << lane);
                    resume(32 * (int)(&warp - warps) + lane);
                    if (error[0]) return;
                }
            }
        }
    }
    for (int w = 0; w < n_warps; w++)
        if (warps[w].returned != ~0u) return describe_what_waits();
    for (int i = shared; i < shared + BEYOND; i++)
        if (dynamic[i] != 0xff) {
            snprintf(error, sizeof error, "block (%u, %u, %u) wrote byte %d of %d bytes of shared memory", blockIdx.x, blockIdx.y, blockIdx.z, i, shared);
            return;
        }
}

// Runs a grid; what went wrong, or null.
const char* run_grid(const u32* grid, int threads_, int shared, void (*kernel)()) {
    error[0] = 0;
    if (threads_ < 1 || threads_ > MOST_THREADS || shared < 0 || shared > MOST_DYNAMIC) return "a block cannot be as large";
    if (!stacks) stacks = (char*)mmap(nullptr, (size_t)MOST_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int i = 0; i < MOST_THREADS; i++) mprotect(stacks + (size_t)i * STACK, 4096, PROT_NONE);
    run_kernel = kernel;
    count = threads_;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {(u32)threads_, 1, 1};
    threadIdx = {0, 0, 0};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++) {
                run_block(shared);
                if (error[0]) return error;
            }
    return nullptr;
}

// Calls a kernel with arguments that are where ``values`` points, as the driver does.
template <class... P, size_t... I>
void call(void (*kernel)(P...), void** values, std::index_sequence<I...>) { kernel(*(P*)values[I]...); }
template <class... P>
void call(void (*kernel)(P...), void** values) { call(kernel, values, std::index_sequence_for<P...>()); }
// Sizes of a kernel's arguments, 0 after the last.
template <class... P>
const int* sizes_of(void (*)(P...)) { static const int sizes[] = {(int)sizeof(P)..., 0}; return sizes; }
void** values_of_kernel;

// host_NAME and host_sizes_NAME, for whoever loads this.
#define HOST_KERNEL(NAME) \
    extern "C" __attribute__((visibility("default"))) const int* host_sizes_##NAME() { return host::sizes_of(NAME); } \
    extern "C" __attribute__((visibility("default"))) const char* host_##NAME(const u32* grid, int threads, int shared, void** values) { \
        host::values_of_kernel = values; \
        return host::run_grid(grid, threads, shared, [] { host::call(NAME, host::values_of_kernel); }); \
    }

}  // namespace host

// ------------------------------------------------------------------------------------------- what CUDA gives by itself
void __syncthreads() {
    using namespace host;
    self->waits_at = "__syncthreads";
    self->mask = 0;
    if (++at_barrier < count) return pause();
    at_barrier = 0;
    for (int i = 0; i < count; i++) warps[i / 32].can_go |= 1u << i % 32;
}
void __syncwarp(u32 mask = ~0u) {
    int nothing;
    host::together("__syncwarp", mask, nothing, [](int*(&)[32]) {});
}
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace host {
template <class T> struct Shuffle { T mine, result; int from; };
// A lane outside of the mask gives nothing that counts.
template <class T>
T shuffle(const char* name, u32 mask, T x, int from) {
    Shuffle<T> s = {x, x, from};
    together(name, mask, s, [](Shuffle<T>* (&all)[32]) {
        for (Shuffle<T>* to : all)
            if (to) {
                if (all[to->from]) to->result = all[to->from]->mine;
                else memset(&to->result, 0xff, sizeof(T));
            }
    });
    return s.result;
}
struct Vote { bool yes; u32 result; };
u32 vote(const char* name, u32 mask, bool yes) {
    Vote v = {yes, 0};
    together(name, mask, v, [](Vote* (&all)[32]) {
        u32 found = 0;
        for (int i = 0; i < 32; i++) found |= (u32)(all[i] && all[i]->yes) << i;
        for (Vote* to : all) if (to) to->result = found;
    });
    return v.result;
}
}  // namespace host

template <class T> T __shfl_sync(u32 mask, T x, int from, int width = 32) {
    const int lane = host::self->lane;
    return host::shuffle("__shfl_sync", mask, x, (lane & ~(width - 1)) | (from & (width - 1)));
}
template <class T> T __shfl_xor_sync(u32 mask, T x, int bits, int width = 32) {
    const int lane = host::self->lane, from = lane ^ bits;
    return host::shuffle("__shfl_xor_sync", mask, x, from < (lane & ~(width - 1)) + width ? from : lane);
}
template <class T> T __shfl_down_sync(u32 mask, T x, int by, int width = 32) {
    const int lane = host::self->lane;
    return host::shuffle("__shfl_down_sync", mask, x, (lane & (width - 1)) + by < width ? lane + by : lane);
}
template <class T> T __shfl_up_sync(u32 mask, T x, int by, int width = 32) {
    const int lane = host::self->lane;
    return host::shuffle("__shfl_up_sync", mask, x, (lane & (width - 1)) >= by ? lane - by : lane);
}
inline u32 __ballot_sync(u32 mask, bool yes) { return host::vote("__ballot_sync", mask, yes); }
inline bool __any_sync(u32 mask, bool yes) { return host::vote("__any_sync", mask, yes); }
inline bool __all_sync(u32 mask, bool yes) { return host::vote("__all_sync", mask, yes) == mask; }

template <class T, class X> T same_bits(X x) { static_assert(sizeof(T) == sizeof(X)); T y; memcpy(&y, &x, sizeof y); return y; }
inline u32 __float_as_uint(float x) { return same_bits<u32>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __uint_as_float(u32 x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }

inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    const unsigned long long both = (unsigned long long)y << 32 | x;
    u32 z = 0;
    for (int i = 0; i < 4; i++) {
        const u32 s = selector >> (4 * i) & 15, byte = both >> (8 * (s & 7)) & 255;
        z |= (s & 8 ? byte >> 7 ? 255 : 0 : byte) << (8 * i);
    }
    return z;
}
inline u32 __vmaxu2(u32 x, u32 y) {
    const u32 low = (x & 0xffff) > (y & 0xffff) ? x & 0xffff : y & 0xffff, high = x >> 16 > y >> 16 ? x >> 16 : y >> 16;
    return high << 16 | low;
}
inline float __fdividef(float x, float y) { return fabsf(y) > 0x1p126f && !isinf(x) ? 0.f : x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rd(float x, float y) {
    const double sum = (double)x + y;  // exact but for the smallest of bits
    const float near = (float)sum;
    return near > sum ? nextafterf(near, -INFINITY) : near;
}
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }
inline int saturated(double x) { return x != x ? 0 : x >= 0x1p31 ? 0x7fffffff : x < -0x1p31 ? (int)0x80000000 : (int)x; }
inline int __float2int_rn(float x) { return saturated(rint((double)x)); }
inline int __float2int_rd(float x) { return saturated(floor((double)x)); }
inline int __float2int_rz(float x) { return saturated(x); }
inline float __int2float_rn(int x) { return (float)x; }
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) return (T)fmin(a, b);
    else return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) return (T)fmax(a, b);
    else return (T)a > (T)b ? (T)a : (T)b;
}
template <class T> T __ldg(const T* x) { return *x; }
template <class T, class X> T atomicAdd(T* to, X x) { const T old = *to; *to = old + (T)x; return old; }
template <class T, class X> T atomicMax(T* to, X x) { const T old = *to; *to = old > (T)x ? old : (T)x; return old; }
template <class T, class X> T atomicMin(T* to, X x) { const T old = *to; *to = old < (T)x ? old : (T)x; return old; }
template <class T, class X> T atomicOr(T* to, X x) { const T old = *to; *to = old | (T)x; return old; }

// ---------------------------------------------------------------------------------------------- what device.cu defines
inline void finished_before() {}
inline void next_may_start() {}

inline float exp2_(float x) { const float y = exp2f(x); return y < 0x1p-126f ? 0.f : y; }
inline float from_f16(u16 x) {
    const u32 bits = (u32)(x & 0x7fff) << 13;
    const float y = (x & 0x7c00) == 0x7c00 ? same_bits<float>(bits | 0x7f800000u) : same_bits<float>(bits) * 0x1p112f;
    return x >> 15 ? -y : y;
}
inline u16 to_f16(float x) {
    const u32 bits = same_bits<u32>(x) & 0x7fffffffu, sign = same_bits<u32>(x) >> 16 & 0x8000u;
    if (bits > 0x7f800000u) return 0x7fff;
    if (bits >= 0x477ff000u) return sign | 0x7c00;
    if (bits < 0x38800000u) return sign | (u16)rintf(fabsf(x) * 0x1p24f);
    return sign | (((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
}
inline float from_bf16(u16 x) { return same_bits<float>((u32)x << 16); }
inline u16 to_bf16(float x) {
    const u32 bits = same_bits<u32>(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 to_f16_pair(float x, float y) { return to_f16(x) | (u32)to_f16(y) << 16; }
inline u32 to_bf16_pair(float x, float y) { return to_bf16(x) | (u32)to_bf16(y) << 16; }

u32 transposed(u32 x) {
    host::Shuffle<u32> s = {x, 0, 0};
    host::together("transposed", ~0u, s, [](host::Shuffle<u32>* (&all)[32]) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 2; i++) {
                const int row = 2 * (lane % 4) + i, column = lane / 4;
                all[lane]->result |= (all[4 * row + column / 2]->mine >> (16 * (column % 2)) & 0xffff) << (16 * i);
            }
    });
    return s.result;
}

namespace host {
// Fragments: of A rows r and r + 8, of B column r, of C columns 2c and 2c + 1, where lane = 4r + c.
template <class N> struct Product { N (&c)[4]; u32 a[4], b[2]; };
float number_of(u16 x, std::true_type) { return from_bf16(x); }
float number_of(u16 x, std::false_type) { return from_f16(x); }
template <class A, class B>
__attribute__((optimize("O3"))) void products_of_bytes(Product<int>* (&all)[32]) {
    A a[16][32];
    B b[8][32];
    int turned[32][8], sums[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const int r = lane / 4, c = lane % 4;
        for (int i = 0; i < 4; i++) memcpy(&a[r + 8 * (i & 1)][16 * (i >> 1) + 4 * c], &all[lane]->a[i], 4);
        for (int i = 0; i < 2; i++) memcpy(&b[r][16 * i + 4 * c], &all[lane]->b[i], 4);
        for (int i = 0; i < 4; i++) sums[r + 8 * (i >> 1)][2 * c + (i & 1)] = all[lane]->c[i];
    }
    for (int k = 0; k < 32; k++) for (int n = 0; n < 8; n++) turned[k][n] = b[n][k];
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 32; k++)
            for (int n = 0; n < 8; n++) sums[i][n] += (int)a[i][k] * turned[k][n];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) all[lane]->c[i] = sums[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
}
template <class BF16>
__attribute__((optimize("O3"))) void products_of_halves(Product<float>* (&all)[32]) {
    double a[16][16], b[16][8], sums[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const int r = lane / 4, c = lane % 4;
        for (int half = 0; half < 2; half++) {
            const int shift = 16 * half, k = 2 * c + half;
            for (int i = 0; i < 4; i++) a[r + 8 * (i & 1)][8 * (i >> 1) + k] = number_of((u16)(all[lane]->a[i] >> shift), BF16());
            for (int i = 0; i < 2; i++) b[8 * i + k][r] = number_of((u16)(all[lane]->b[i] >> shift), BF16());
        }
        for (int i = 0; i < 4; i++) sums[r + 8 * (i >> 1)][2 * c + (i & 1)] = all[lane]->c[i];
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 8; n++) sums[i][n] += a[i][k] * b[k][n];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) all[lane]->c[i] = (float)sums[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
}
}  // namespace host

#define MMA(NAME, NUMBER, PRODUCTS) \
    inline void NAME(NUMBER (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
        host::Product<NUMBER> mine = {c, {a0, a1, a2, a3}, {b0, b1}}; \
        host::together(#NAME, ~0u, mine, PRODUCTS); \
    }
MMA(mma_u8s8, int, (host::products_of_bytes<u8, signed char>))
MMA(mma_u8u8, int, (host::products_of_bytes<u8, u8>))
MMA(mma_s8s8, int, (host::products_of_bytes<signed char, signed char>))
MMA(mma_f16, float, host::products_of_halves<std::false_type>)
MMA(mma_bf16, float, host::products_of_halves<std::true_type>)

// Addresses in shared memory are distances from where it starts.
inline u32 shared_address(const void* x) { return (u32)((const u8*)x - host::__start_block_memory); }
namespace host {
u8* shared_place(u32 address, int bytes) {
    if (address % bytes) fail("address %x of shared memory is no multiple of %d", address, bytes);
    if (address + bytes > __stop_block_memory - __start_block_memory) fail("address %x is outside of shared memory", address);
    return __start_block_memory + address;
}
// The oldest groups arrive until so many are left.
void arrive(size_t left) {
    auto& groups = self->groups;
    size_t n = 0;
    for (; groups.size() - n > left; n++)
        for (const Copy& copy : groups[n]) memcpy(copy.to, copy.from, 16);
    groups.erase(groups.begin(), groups.begin() + n);
}
}  // namespace host
template <int TO = 0, int FROM = 0>
void copy_16(u32 to, const void* from) {
    u8* place = host::shared_place(to + TO, 16);
    if ((size_t)from % 16) host::fail("a copy of 16 bytes from %p, which is no multiple of 16", from);
    memset(place, 0xff, 16);
    host::self->groups.back().push_back({place, (const u8*)from + FROM});
}
inline void end_group() { host::self->groups.emplace_back(); }
template <int LEFT> void wait_for_groups() { host::arrive(LEFT + 1); }
inline void wait_for_copies() { host::arrive(0); host::self->groups.assign(1, {}); }
