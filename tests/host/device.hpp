// What stands in for device.cu behind fibers.hpp: CUDA's own names, then those of device.cu.
// An asynchronous copy writes 0xff when it is sent for, and arrives only when its thread waits for it.

#define __global__
#define __device__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define DEVICE inline
#define DYNAMIC_SHARED(TYPE, NAME) TYPE* NAME = (TYPE*)host::dynamic

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

void __syncthreads() {
    using namespace host;
    self->waits_at = "__syncthreads";
    self->mask = 0;
    if (++at_barrier < count) return pause();
    at_barrier = 0;
    for (int i = 0; i < count; i++) warps[i / 32].can_go |= 1u << i % 32;
}
// As many threads wait for each other at one of several barriers.
void sync_some(int barrier, int n) {
    using namespace host;
    self->waits_at = "sync_some";
    self->mask = barrier;
    at_some[barrier].push_back((int)(self - threads));
    if ((int)at_some[barrier].size() < n) return pause();
    for (const int i : at_some[barrier]) warps[i / 32].can_go |= 1u << i % 32;
    at_some[barrier].clear();
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
inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
// Exact where the sum has no bits below those of a double.
inline float __fmaf_rd(float x, float y, float z) {
    const double exact = (double)x * y + z;
    const float near = (float)exact;
    return near > exact ? std::nextafter(near, -INFINITY) : near;
}
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

// ------------------------------------------------------------------------------------------------ names of device.cu
inline void finished_before() {}
inline void next_may_start() {}

inline void forget(float&) {}
inline void rest(int) {}
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
namespace host {
struct Matrices { u32 (&a)[4]; u32 row; };
}
void load_matrices(u32 (&a)[4], u32 row) {
    host::Matrices mine = {a, row};
    host::together("load_matrices", ~0u, mine, [](host::Matrices* (&all)[32]) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                memcpy(&all[lane]->a[i], host::shared_place(all[8 * i + lane / 4]->row, 16) + 4 * (lane % 4), 4);
    });
}
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
