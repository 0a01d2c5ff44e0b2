// Runs the blocks of a grid one after the other, each thread of a block a fiber.
//
// A thread runs until it waits for others: at a product, a shuffle, __syncwarp or __syncthreads. Which of the threads that
// can go on does so first changes from turn to turn, so that threads which count on an order do not get it every time.
// Shared memory holds 0xff wherever a block has not written yet.

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

struct dim3 { u32 x, y, z; };
dim3 threadIdx, blockIdx, blockDim, gridDim;
#define __shared__ static __attribute__((section("block_memory")))

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
std::vector<int> at_some[16];
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
bool coin() { return (random_bits = random_bits * 1664525u + 1013904223u) >> 30 & 1; }
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
    for (auto& waiting : at_some) waiting.clear();
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

// Runs a grid, its blocks in order or backwards; what went wrong, or null.
const char* run_grid(const u32* grid, int n_threads, int shared, u32 seed, void (*kernel)()) {
    if (n_threads < 1 || n_threads > MOST_THREADS || shared < 0 || shared > MOST_DYNAMIC) return "a block cannot be as large";
    const size_t size = (size_t)n_threads * STACK;
    stacks = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) return "there is no memory for the threads' stacks";
    for (int i = 0; i < n_threads; i++) mprotect(stacks + (size_t)i * STACK, 4096, PROT_NONE);
    run_kernel = kernel;
    count = n_threads;
    random_bits = seed;
    error[0] = 0;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {(u32)n_threads, 1, 1};
    const u32 blocks = grid[0] * grid[1] * grid[2];
    const bool backwards = coin();
    for (u32 i = 0; i < blocks && !error[0]; i++) {
        const u32 at = backwards ? blocks - 1 - i : i;
        blockIdx = {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
        run_block(shared);
    }
    munmap(stacks, size);
    return error[0] ? error : nullptr;
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
    extern "C" __attribute__((visibility("default"))) const char* host_##NAME(const u32* grid, int threads, int shared, u32 seed, void** values) { \
        host::values_of_kernel = values; \
        return host::run_grid(grid, threads, shared, seed, [] { host::call(NAME, host::values_of_kernel); }); \
    }

}  // namespace host
